"""Python runs this file when a process begins whose parent has this engine as `vllm`: PYTHONPATH has its folder."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

FOLDER = Path(__file__).parent
PLACES = {
    "nanovllm": [str(FOLDER.parents[3])],  # the parent's, which need not lie in this process's path
    "sitecustomize": [place for place in sys.path if place != str(FOLDER)],  # the one that this file hides, if any
}
for name, places in PLACES.items():
    if (spec := PathFinder.find_spec(name, places)) and spec.loader:
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])

from nanovllm.apps.standin.finders import put_finder  # noqa: E402

put_finder()
