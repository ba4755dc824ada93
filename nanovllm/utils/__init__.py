"""Helpers that know nothing of the engine: checks of users' values, clocks, facts about the machine."""
