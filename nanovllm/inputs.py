"""Things that users give under vLLM's names: two forms of a prompt, and an adapter."""

import os
from dataclasses import dataclass
from typing import TypedDict

from nanovllm.utils.checks import refuse


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
