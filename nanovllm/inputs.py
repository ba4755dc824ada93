"""vLLM's names for the two forms of a prompt that are dicts, and for arguments that this engine does not have."""

from typing import TypedDict


class TextPrompt(TypedDict):
    """A prompt that is a text: TextPrompt(prompt="...")."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt that is token ids: TokensPrompt(prompt_token_ids=[...])."""

    prompt_token_ids: list[int]


class Others(TypedDict, total=False):
    """No arguments, for type checkers. vllm_names.py answers a script that gives an argument of vLLM's methods."""
