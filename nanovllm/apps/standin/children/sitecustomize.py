"""Python runs this file when a process begins whose parent has this engine as `vllm`: PYTHONPATH has its folder."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

FOLDER = Path(__file__).parent

# The package of the parent process, which need not lie in this one's path; then the file that this one hides, if any.
for spec in (
    spec_from_file_location("nanovllm", FOLDER.parents[2] / "__init__.py"),
    PathFinder.find_spec("sitecustomize", [place for place in sys.path if place != str(FOLDER)]),
):
    if spec is not None and spec.loader is not None:
        sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])

from nanovllm.apps.standin.finders import put_finder  # noqa: E402

put_finder()
