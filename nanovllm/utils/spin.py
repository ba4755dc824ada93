"""Bounds how long idle threads wait for work without sleeping. libgomp reads that from the environment, with torch."""

import os
import sys

SPIN_COUNT = "50000"
"""About 3 ms: longer than Python takes between two operators, and a tenth of libgomp's default."""


def bound_spinning() -> None:
    """Set the bound, unless torch is loaded already or the user has set one.

    On a busy machine, threads that wait without sleeping (spin) can keep the thread that they wait for from running.
    """
    if "torch" not in sys.modules and not is_spinning_bounded():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def is_spinning_bounded() -> bool:
    """Return whether the environment says how long threads may spin."""
    return bool(os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
