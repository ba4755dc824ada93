"""A grammar that holds from the end of the thinking on: what the model thinks is free, what it answers fits."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from nanovllm.features.parsing.thinking import ThinkingTokens

Place = tuple["LLMatcher", int, list[int]]
"""A matcher, the row of the step's masks that it begins with, and the drafts after that row."""


class AfterThinking:
    """The grammar of one completion, with the methods of an LLMatcher that the engine calls.

    Tokens of the thinking do not reach the grammar.
    """

    def __init__(self, matcher: "LLMatcher", thinking: "ThinkingTokens", is_opened: bool | None) -> None:
        """
        Args:
            matcher: stands at the start of the grammar.
            is_opened: whether the prompt opened the thinking: see `ThinkingTokens.is_opened_by`.
        """
        self._matcher = matcher
        self._tokens = thinking
        self._is_thinking = is_opened
        """None before the first token of an output that may begin to think."""

    def consume_token(self, token_id: int) -> bool:
        if self._is_thinking is None:
            self._is_thinking = token_id == self._tokens.open
            return self._is_thinking or self._matcher.consume_token(token_id)
        if self._is_thinking:
            self._is_thinking = token_id != self._tokens.close
            return True
        return self._matcher.consume_token(token_id)

    def is_stopped(self) -> bool:
        return self._is_thinking is False and self._matcher.is_stopped()

    def is_error(self) -> bool:
        return self._matcher.is_error()

    def get_error(self) -> str:
        return self._matcher.get_error()

    def list_places(self, row: int, drafts: list[int]) -> tuple[list[Place], int | None]:
        """Tell which rows of a step's masks the grammar fills. In the other rows every token may come.

        Args:
            row: that of the next token. Those of the tokens after each draft follow it.

        Returns:
            The places, and the token that may come in the first row beside those of the grammar; None if there is none.
        """
        places: list[Place] = []
        if self._is_thinking is False:
            return [(self._matcher, row, drafts)], None
        if self._is_thinking is None:
            if drafts[:1] != [self._tokens.open]:
                return [(self._matcher, row, drafts)], self._tokens.open
            # The drafts think. A copy, because one call that fills masks takes each matcher only once.
            places.append((self._matcher.deep_copy(), row, []))
        if self._tokens.close in drafts:
            first = drafts.index(self._tokens.close) + 1
            places.append((self._matcher, row + first, drafts[first:]))
        return places, None if self._is_thinking else self._tokens.open
