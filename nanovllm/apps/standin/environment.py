"""Makes `vllm` this engine in the processes that this one starts: by their environment. Nothing is installed."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from nanovllm.version import __version__

VARIABLE = "NANOVLLM_AS_VLLM"

VERSION = os.environ.get(VARIABLE, "0.30.0")
"""The version of vLLM that is claimed. Clients refuse versions that they do not know, so the environment chooses."""


def prepare_children(version: str = VERSION, replace: bool = False) -> None:
    """Make `vllm` this engine in processes that this one starts, and say so on stderr.

    Args:
        version: the version of vLLM to claim.
        replace: do so even if vLLM itself is installed.

    Raises:
        ValueError: vLLM is installed.
    """
    real = find_spec("vllm")
    if real is not None and real.origin is not None and not replace:  # the stand-in has no file
        raise ValueError(f"vLLM is installed ({real.origin}): use another environment, or nanovllm run --replace")
    path = [str(Path(__file__).parent / "children"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.update({VARIABLE: version, "PYTHONPATH": os.pathsep.join(filter(None, path))})
    sys.stderr.write(f"vllm is nanovllm {__version__} in this process and its children; it calls itself {version}\n")
