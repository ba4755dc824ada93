"""Makes `vllm` this engine in one process, by a finder of modules and versions."""

import sys
from functools import partial
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from nanovllm.apps.standin.environment import VERSION, prepare_children
from nanovllm.utils.foreign_names import advise, explain_missing
from nanovllm.version import __version__

MODULES = (
    *("config", "distributed.parallel_state", "distributed.weight_transfer.nccl_common", "engine.arg_utils"),
    *("distributed.weight_transfer.nccl_engine", "distributed.weight_transfer.packed_tensor", "engine.llm_engine"),
    *("engine.async_llm_engine", "entrypoints.llm", "entrypoints.chat_utils", "inputs.data", "logger", "logprobs"),
    *("lora.request", "outputs", "platforms", "pooling_params", "renderers.hf", "sampling_params", "sequence"),
    *("tokenizers", "transformers_utils.tokenizer", "utils.argparse_utils", "utils.network_utils"),
    *("utils.print_utils", "version", "v1.engine.async_llm", "v1.metrics.reader"),
)
"""The modules of vLLM's that its clients import. The packages that they lie in are answered, too."""


def is_answered(name: str) -> bool:
    """Return whether a module is `vllm`, or one of MODULES or their packages."""
    return any(f"vllm.{module}.".startswith(f"{name}.") for module in MODULES)


class _Version(Distribution):
    """Answers `importlib.metadata.version("vllm")`. It has no files."""

    def read_text(self, filename: str) -> str:
        return f"Name: vllm\nVersion: {VERSION}\nSummary: nanovllm {__version__} stands for it\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


def find_name(module: str, name: str) -> Any:
    """Return what stands for a name in a module of vLLM's; AttributeError if nothing does.

    torch is imported only now, when a script asks for a name.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
    if is_answered(f"{module}.{name}"):
        return import_module(f"{module}.{name}")
    from nanovllm.apps.standin.llm import NAMES

    if name not in NAMES:
        raise explain_missing("nanovllm, which is vllm here,", name)
    return NAMES[name]


class _Finder(DistributionFinder, Loader):
    """Python asks it for modules, and importlib.metadata for versions."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Answer for `vllm` and its modules. After `from module import name` Python asks for the name, too.

        Raises:
            ImportError: vLLM has it, and we do not.
        """
        if is_answered(name):
            return ModuleSpec(name, self, is_package=True)
        if name.startswith("vllm.") and (advice := advise(name)):
            raise ImportError(f"{name}: nanovllm, which is vllm here, does not have it: {advice}", name=name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        finder = partial(find_name, module.__name__)
        vars(module).update(__version__=VERSION, __nanovllm__=__version__, __getattr__=finder)

    def find_distributions(self, context: Any = None) -> list[Distribution]:
        return [_Version()] if context is not None and context.name == "vllm" else []


def put_finder() -> None:
    """Make `vllm` this engine in this process."""
    sys.meta_path.insert(0, _Finder())


def install() -> None:
    """Make `vllm` this engine in this process and its children. A child has it already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        prepare_children()
        put_finder()
