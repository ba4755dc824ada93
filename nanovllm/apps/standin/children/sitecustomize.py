"""Python runs this file when it starts in a child of a process whose `vllm` is this engine: PYTHONPATH has its folder."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent


def _load(spec: ModuleSpec) -> ModuleType:
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)
    return module


# The parent's own package: its folder may not be in this process's path.
if package := spec_from_file_location("nanovllm", FOLDER.parents[2] / "__init__.py"):
    _load(package)
    from nanovllm.apps.standin.finders import put_finder

    put_finder()
# This file hides another one of its name, which an installation may have.
if hidden := PathFinder.find_spec("sitecustomize", [place for place in sys.path if place != str(FOLDER)]):
    _load(hidden)
