"""The distribution that sampled tokens must follow, and how likely observed counts are under it."""

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_P = 1e-3
"""The seeds are fixed, so a test that passes keeps passing; of right samplers one case in 1,000 would miss this."""


def exact(logits: Floats, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Floats:
    """The distribution in float64, token by token: temperature, top-k, top-p on what is left, min-p. No ties."""
    p = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-p)
    kept = list(order[:top_k] if top_k else order)
    mass = 0.0
    total = p[kept].sum()
    nucleus = []
    for token in kept:
        if mass >= top_p * total:
            break
        nucleus.append(token)
        mass += p[token]
    nucleus = [token for token in nucleus if p[token] >= min_p * p.max()]
    q = np.zeros_like(p)
    q[nucleus] = p[nucleus] / p[nucleus].sum()
    return q


def chi_square_p(counts: Floats, probabilities: Floats) -> float:
    """The chance of frequencies at least this far from the distribution; tokens expected under 5 times are pooled."""
    assert not counts[probabilities == 0].any(), "a token was drawn that has no probability"
    expected = probabilities * counts.sum()
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    counts = counts[expected > 0]
    expected = expected[expected > 0]
    if len(counts) == 1:
        return 1.0
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), torch.tensor(statistic / 2)))
