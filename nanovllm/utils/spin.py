"""How long idle threads look for work before they sleep: libgomp reads it from the environment once, with torch."""

import os
import sys

SPIN_COUNT = "50000"
"""About 3 ms: longer than the Python between two operators, and a tenth of libgomp's own."""


def bound_spinning() -> None:
    """On a busy machine, threads that spin keep the one that they wait for from running.

    Only before torch is loaded; what the user has set stays.
    """
    if "torch" not in sys.modules and not is_spinning_bounded():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def is_spinning_bounded() -> bool:
    return bool(os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
