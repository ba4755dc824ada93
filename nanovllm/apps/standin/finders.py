"""Makes `vllm` this engine in one process, by a finder of modules and versions."""

import os
import sys
from functools import cache
from importlib import abc, import_module, machinery, metadata
from types import ModuleType
from typing import Any

from nanovllm.apps.standin.environment import VERSION, find_vllm, prepare_children
from nanovllm.apps.standin.names import MODULES, advise, explain_missing
from nanovllm.version import __version__


def is_answered(name: str) -> bool:
    """Return whether a module is `vllm`, or one of MODULES or their packages."""
    return any(f"vllm.{module}.".startswith(f"{name}.") for module in MODULES.split())


class _Version(metadata.Distribution):
    """Answers `importlib.metadata.version("vllm")`. It has no other files."""

    def read_text(self, filename: str) -> str | None:
        return f"Name: vllm\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class _Finder(metadata.DistributionFinder, abc.Loader):
    """Python asks it for modules, and importlib.metadata for versions."""

    def find_spec(self, name: str, *_: Any) -> machinery.ModuleSpec | None:
        """Answer for `vllm` and its modules. After `from module import name` Python asks for a missing name, too.

        Raises:
            ImportError: vLLM has it, and we do not.
        """
        if name.partition(".")[0] != "vllm" or not is_vllm():
            return None
        if is_answered(name):
            return machinery.ModuleSpec(name, self, is_package=True)
        if advice := advise(name):
            raise ImportError(f"{name}: nanovllm, which is vllm here, does not have it: {advice}", name=name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        from nanovllm.apps.standin.llm import NAMES, OWN_NAMES  # this imports torch

        def find_missing(name: str) -> Any:
            """Return a module that no import has named, or a variable. All other names that are not there are missing.

            Of vLLM's variables only those are known that the environment has. The others are None.
            """
            if module.__name__ == "vllm.envs" and name.startswith("VLLM_"):
                return os.environ.get(name)
            if is_answered(f"{module.__name__}.{name}"):
                return import_module(f"{module.__name__}.{name}")
            raise explain_missing("nanovllm, which is vllm here,", name)

        own = {"__version__": VERSION, "__nanovllm__": __version__, "__getattr__": find_missing}
        vars(module).update(NAMES | OWN_NAMES.get(module.__name__, {}) | own)

    def find_distributions(self, context: Any = None) -> list[metadata.Distribution]:
        return [_Version()] if context is not None and context.name == "vllm" and is_vllm() else []


FINDER = _Finder()


@cache
def is_vllm() -> bool:
    """Return whether `vllm` is this engine in this process. A child may have vLLM itself where its parent has none."""
    real = find_vllm(FINDER)
    if real is not None:
        sys.stderr.write(f"vLLM is installed ({real}), and vllm is vLLM itself in this process: nanovllm did nothing\n")
    return real is None


def install() -> None:
    """Make `vllm` this engine in this process and its children. A child has it already."""
    if FINDER not in sys.meta_path:
        prepare_children()
        sys.meta_path.insert(0, FINDER)
