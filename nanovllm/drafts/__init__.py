"""Speculative decoding: who guesses coming tokens, and how many of them a step verifies. Imported when asked for."""
