"""Doing: what runs the plans on a device."""
