"""nano-vLLM: offline batch inference of Qwen, Llama and Mistral models, by an engine small enough to be understood."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm import config, engine, inputs, outputs, sampling_params, utils
from nanovllm.config import EngineConfig
from nanovllm.inputs import LoRARequest, TextPrompt, TokensPrompt
from nanovllm.outputs import Completion, CompletionOutput, Output, RequestOutput
from nanovllm.sampling_params import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from nanovllm.utils.foreign_names import check_import, refuse_name
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

    return find_name(name, __all__)


class _Elsewhere:
    """Python looks here last for a module of this package, and for a name after `from nanovllm import`."""

    @staticmethod
    def find_spec(name: str, _: Any = None) -> None:
        check_import(name, __all__)


_ELSEWHERE = f"{__path__[0]}/elsewhere"
sys.path_importer_cache[_ELSEWHERE] = _Elsewhere()
for path in (__path__, engine.__path__, utils.__path__):  # where vLLM has modules that scripts import
    path.append(_ELSEWHERE)
for module in (config, inputs, outputs, sampling_params):  # vLLM's have names that these do not have
    vars(module)["__getattr__"] = partial(refuse_name, module.__name__)
