"""Makes `vllm` this engine in the processes that this one starts: by their environment. Nothing is installed."""

import os
import sys
from pathlib import Path
from typing import Any

from nanovllm.version import __version__

VARIABLE = "NANOVLLM_AS_VLLM"

REPLACES = "NANOVLLM_REPLACES_VLLM"
"""The variable that says to be `vllm` even where vLLM itself is installed."""

VERSION = os.environ.get(VARIABLE, "0.30.0")
"""The version of vLLM that is claimed. Clients refuse versions that they do not know, so the environment chooses."""


def find_vllm(standin: Any = None) -> str | None:
    """Return the file of vLLM itself, if it is installed and shall not be replaced.

    Args:
        standin: the finder that is not asked.
    """
    found = (finder.find_spec("vllm", None) for finder in sys.meta_path if finder is not standin)
    real = next(filter(None, found), None)
    return None if real is None or os.environ.get(REPLACES) else real.origin


def prepare_children(version: str = VERSION, replace: bool = False) -> None:
    """Make `vllm` this engine in processes that this one starts, and say so on stderr.

    Args:
        version: the version of vLLM to claim.
        replace: do so even if vLLM itself is installed.

    Raises:
        ValueError: vLLM is installed.
    """
    if replace:
        os.environ[REPLACES] = "1"
    if (real := find_vllm()) is not None:  # a stand-in that is there already has no file
        raise ValueError(f"vLLM is installed ({real}): use another environment, or nanovllm run --replace")
    path = [str(Path(__file__).parent / "children"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.update({VARIABLE: version, "PYTHONPATH": os.pathsep.join(filter(None, path))})
    sys.stderr.write(f"vllm is nanovllm {__version__} in this process and its children; it calls itself {version}\n")
