"""Costs of steps with which every draft pays."""

import numpy as np

from nanovllm.features.drafts.costs import StepCosts

FREE = StepCosts(np.array([1.0, 99.0]), np.ones(2), np.ones(2), np.zeros(2))
"""A step costs the same whatever it computes: every draft pays."""
