"""Quantised weights: whole numbers with scales, made at load or read from a checkpoint, and how they multiply."""
