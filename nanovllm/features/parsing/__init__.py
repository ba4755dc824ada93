"""Reads out of an answer more than its text: the thinking, and calls of tools."""
