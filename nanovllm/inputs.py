"""Things that users give under vLLM's names: two forms of a prompt, an adapter, and arguments of methods."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypedDict

from nanovllm.sampling_params import refuse_sampling
from nanovllm.utils.checks import refuse, refuse_unknown
from nanovllm.utils.foreign_names import translate_names
from nanovllm.utils.vllm_names import ACCEPTED


class TextPrompt(TypedDict):
    """A prompt that is a text: TextPrompt(prompt="...")."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt that is token ids: TokensPrompt(prompt_token_ids=[...])."""

    prompt_token_ids: list[int]


@dataclass(frozen=True)
class LoRARequest:
    """vLLM's name for the adapter of a request: see `lora_request` of `LLM.generate`. Its content alone counts.

    Attributes:
        lora_path: a folder with PEFT's adapter_config.json and adapter_model.safetensors.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_path, str | os.PathLike) or not os.fspath(self.lora_path):
            raise refuse(self.lora_path, "lora_path", "a folder with an adapter")


class PoolingParams:
    """vLLM's name for arguments of `embed`: `dimensions`, and `use_activation`, which is our `normalize`."""

    def __init__(self, dimensions: int | None = None, use_activation: bool | None = None, **others: Any) -> None:
        refuse_unknown(translate_names(others, "PoolingParams"), ("dimensions", "use_activation"), "PoolingParams")
        self.dimensions = dimensions
        self.use_activation = use_activation


class Others(TypedDict, total=False):
    """No arguments, for type checkers. `translate_arguments` answers a script that gives an argument of vLLM's."""


def translate_arguments(method: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our arguments for those of vLLM's method. Raise an error for others, unless they change nothing.

    Args:
        method: our method of that name, a function of `LLM`.
    """
    name = method.__name__
    params = given.get("pooling_params")
    if name == "embed" and isinstance(params, PoolingParams):
        ours = {"dimensions": params.dimensions, "normalize": params.use_activation is not False}
        return ours | translate_arguments(method, {**given, "pooling_params": None})
    rest = translate_names(given, name)
    refuse_sampling(rest, name)
    if rest:
        known = [*signature(method).parameters][1:-1]  # without `self` and `others`
        refuse_unknown(rest, [*known, *ACCEPTED["methods"]], name)
    return {}
