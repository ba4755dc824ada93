"""Runs the plans of engine/ on a device."""
