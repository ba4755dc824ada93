"""nano-vLLM: offline batch inference of Qwen, Llama and Mistral models, by an engine small enough to be understood."""

from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig
from nanovllm.inputs import LoRARequest, TextPrompt, TokensPrompt
from nanovllm.outputs import Completion, CompletionOutput, Output, RequestOutput
from nanovllm.sampling_params import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import suggest
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
    advice = suggest(name, __all__) or "vLLM's names are there for scripts that `nanovllm run script.py` runs"
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}: {advice}", name=name)
