"""Arithmetic of whole numbers."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Return numerator / denominator, rounded up: how many blocks of `denominator` hold `numerator` tokens."""
    return -(-numerator // denominator)
