"""vLLM's names for the two forms of a prompt that are dicts."""

from typing import TypedDict


class TextPrompt(TypedDict):
    """A prompt that is a text: TextPrompt(prompt="...")."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt that is token ids: TokensPrompt(prompt_token_ids=[...])."""

    prompt_token_ids: list[int]
