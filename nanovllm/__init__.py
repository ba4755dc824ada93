"""nano-vLLM: offline batch inference of Qwen, Llama and Mistral models, by an engine small enough to be understood."""

import sys
from typing import TYPE_CHECKING, Any

from nanovllm import config, inputs, outputs, sampling_params
from nanovllm.config import EngineConfig
from nanovllm.inputs import LoRARequest, TextPrompt, TokensPrompt
from nanovllm.outputs import Completion, CompletionOutput, Output, RequestOutput
from nanovllm.sampling_params import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from nanovllm.utils.spin import bound_spinning
from nanovllm.version import __version__

if TYPE_CHECKING:
    from nanovllm.llm import LLM

__all__ = [
    "LLM",
    "Completion",
    "CompletionOutput",
    "EngineConfig",
    "GuidedDecodingParams",
    "LoRARequest",
    "Output",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

bound_spinning()


def __getattr__(name: str) -> Any:
    """Import LLM, and with it torch, only when it is asked for."""
    if name == "LLM":
        from nanovllm.llm import LLM

        return LLM
    from nanovllm.apps.ported import find_name

    return find_name(name)


class _Finder:
    """Python asks it for a module of this package that is nowhere else. vLLM may have it."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> Any:
        if not name.startswith("nanovllm."):
            return None
        from nanovllm.apps.ported import find_module

        return find_module(name)


sys.meta_path.append(_Finder)
for module in (config, inputs, outputs, sampling_params):  # vLLM has them, too. `from` asks the finder if they have
    vars(module)["__path__"] = []  # a path, as packages do, and not the name.
