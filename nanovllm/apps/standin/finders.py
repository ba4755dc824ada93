"""Makes `vllm` this engine: for a process by a finder of modules and versions, for its children by the environment.

Nothing is installed under that name.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from nanovllm.utils.foreign_names import advise
from nanovllm.version import __version__

VARIABLE = "NANOVLLM_AS_VLLM"
"""The environment variable with the version of vLLM that is claimed. Clients refuse versions that they do not know."""

VERSION = "0.30.0"
"""The version that is claimed if nobody chooses one."""

MODULES = (
    *("config", "distributed", "distributed.parallel_state", "distributed.weight_transfer", "engine", "entrypoints"),
    *("distributed.weight_transfer.nccl_common", "distributed.weight_transfer.nccl_engine", "engine.arg_utils"),
    *("distributed.weight_transfer.packed_tensor", "engine.async_llm_engine", "engine.llm_engine", "entrypoints.llm"),
    *("entrypoints.chat_utils", "inputs", "inputs.data", "logger", "logprobs", "lora", "lora.request", "outputs"),
    *("platforms", "pooling_params", "renderers", "renderers.hf", "sampling_params", "sequence", "tokenizers"),
    *("transformers_utils", "transformers_utils.tokenizer", "utils", "utils.argparse_utils", "utils.network_utils"),
    *("utils.print_utils", "v1", "v1.engine", "v1.engine.async_llm", "v1.metrics", "v1.metrics.reader"),
)
"""The modules of vLLM's that its clients import."""


class _Version(Distribution):
    """Answers `importlib.metadata.version("vllm")`."""

    def __init__(self, version: str) -> None:
        self._text = f"Name: vllm\nVersion: {version}\nSummary: a stand-in by nanovllm {__version__}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        raise FileNotFoundError(f"{path}: vllm is a stand-in, and has no files")


class _Module(ModuleType):
    """A module of vLLM's. It imports what stands for its names, and with it torch, only when it is asked for one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)
        from nanovllm.apps.standin.names import find_name

        return find_name(name)


class _Finder(DistributionFinder):
    """Python asks it for modules, and importlib.metadata for versions."""

    def __init__(self, version: str) -> None:
        self._version = version

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Answer for `vllm` and its modules. After `from module import name` Python asks for the name, too.

        Raises:
            ImportError: vLLM has it, and we do not.
        """
        if name.partition(".")[0] != "vllm":
            return None
        if name == "vllm" or name.removeprefix("vllm.") in MODULES:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        if advice := advise(name):
            parent, _, last = name.rpartition(".")
            raise ImportError(f"{parent} has no {last!r} here, where nanovllm stands for vllm: {advice}", name=name)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__version__=self._version, __nanovllm__=__version__)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:  # type: ignore[override]
        if context is not None and context.name == "vllm":
            yield _Version(self._version)


def put_finder() -> None:
    """Make `vllm` this engine in this process."""
    sys.meta_path.insert(0, _Finder(os.environ.get(VARIABLE, VERSION)))


def is_installed() -> bool:
    """Return whether `vllm` is this engine in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def prepare_children(version: str | None = None, replace: bool = False) -> None:
    """Make `vllm` this engine in processes that this one starts, and say so on stderr.

    Args:
        version: the version of vLLM to claim; None takes that of the environment, or else VERSION.
        replace: do so even if vLLM is installed.

    Raises:
        ValueError: vLLM is installed.
    """
    real = None if is_installed() or replace else importlib.util.find_spec("vllm")
    if real is not None and real.origin is not None:
        raise ValueError(
            f"vLLM itself is installed ({real.origin}), and comparisons with it would compare nanovllm with itself: "
            "use an environment without it, or `nanovllm run --replace`"
        )
    version = version or os.environ.get(VARIABLE, VERSION)
    folder = str(Path(__file__).parent / "children")
    places = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ.update({VARIABLE: version, "PYTHONPATH": os.pathsep.join(dict.fromkeys(places))})
    sys.stderr.write(f"vllm is nanovllm {__version__} in this process and its children; it calls itself {version}\n")
    sys.stderr.flush()


def install() -> None:
    """Make `vllm` this engine in this process and its children. A child has it already."""
    if not is_installed():
        prepare_children()
        put_finder()
