"""Splits an output into thinking and answer: `<think>` ... `</think>`, as Qwen3 and DeepSeek-R1 write it.

Whether an output thinks depends on what the chat template wrote for the answer, at the end of the prompt:

    ... <think>\\n                     the template opened the thinking: the output begins within it
    ... <think>\\n\\n</think>\\n\\n       the template closed it: the output is all answer
    neither                          the output thinks if its first token that is not white space is `<think>`

Tags in the messages say nothing about the answer. Where nobody knows what was written for the answer, as in a prompt
without a template, only a tag at the very end counts.
"""

import re
from collections.abc import Sequence as Seq

from nanovllm.text.prompts import ChatPrompt
from nanovllm.text.tokenizer import Tokenizer

OPEN = "<think>"
CLOSE = "</think>"
CALL = "<tool_call>"


class ThinkingTokens:
    """The ids of the two tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """
        Args:
            tokenizer: the model's; ValueError if it has no such tokens.
        """
        vocabulary = {} if tokenizer is None else tokenizer.vocabulary
        if tokenizer is None or OPEN not in vocabulary or CLOSE not in vocabulary:
            raise ValueError(
                f"reasoning_parser needs a tokenizer with the tokens {OPEN} and {CLOSE}, and this model has none: "
                "leave the option out, and the whole output is the text"
            )
        self._tokenizer = tokenizer
        self.open = vocabulary[OPEN]
        self.close = vocabulary[CLOSE]
        self._call = vocabulary.get(CALL)

    def is_opened_by(self, prompt: Seq[int], text: str | None = None) -> bool | None:
        """Tell whether a prompt opened the thinking (True) or closed it (False); None if it did neither.

        Args:
            text: the prompt's text. If a chat template wrote it, its `opening` alone counts.
        """
        if isinstance(text, ChatPrompt) and text.opening is not None and self._ends_with(prompt, text.opening):
            tags = re.findall(f"{OPEN}|{CLOSE}", text.opening)
            return tags[-1] == OPEN if tags else None
        for token_id in reversed(prompt):
            if token_id in (self.open, self.close):
                return token_id == self.open
            if self._tokenizer.decode_token(token_id).strip():
                return None
        return None

    def _ends_with(self, prompt: Seq[int], opening: str) -> bool:
        """Tell whether a prompt ends with a text. A caller may have changed the token ids, and left the text.

        White space does not count: some tokenizers add a space after a tag, or drop it.
        """
        most_tokens = 2 * len(opening.encode())
        ending = list(prompt[max(len(prompt) - most_tokens, 0) :])
        text = self._tokenizer.decode(ending, skip_special_tokens=False)
        return "".join(text.split()).endswith("".join(opening.split()))

    def find_answer(
        self, prompt: Seq[int], output: Seq[int], text: str | None = None, ends_with_call: bool = True
    ) -> tuple[int, int, int] | None:
        """Find the thinking in an output.

        Args:
            text: the prompt's text: see `is_opened_by`.
            ends_with_call: thinking without an end ends where a call of a tool begins, as Qwen3.5 may write it.

        Returns:
            (start, end, answer): output[start:end] is the thinking, and the answer begins at output[answer]. Thinking
            that was cut reaches to the end of the output. None if the output does not think.
        """
        start = 0
        opened = self.is_opened_by(prompt, text)
        if opened is None:
            while start < len(output) and not self._tokenizer.decode_token(output[start]).strip():
                start += 1
            opened = start < len(output) and output[start] == self.open
            start += 1
        if not opened:
            return None
        rest = list(output[start:])
        if self.close in rest:
            end = start + rest.index(self.close)
            return start, end, end + 1
        end = start + rest.index(self._call) if ends_with_call and self._call in rest else len(output)
        return start, end, end
