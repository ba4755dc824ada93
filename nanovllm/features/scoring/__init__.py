"""Scores and vectors of prompts: what a step computes beside samples, and what becomes of it."""
