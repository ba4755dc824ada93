"""Helpers that know nothing of the engine: checks of users' values, Ctrl-C, clocks, facts about the machine."""
