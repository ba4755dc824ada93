"""Puts thinking and calls of tools under keys of their own in an output."""

from nanovllm.engine.output import read_text
from nanovllm.engine.sequence import Sequence
from nanovllm.features.parsing.thinking import ThinkingTokens
from nanovllm.features.parsing.tool_calls import split_tool_calls
from nanovllm.outputs import Output
from nanovllm.text.tokenizer import Tokenizer


class AnswerParser:
    """Parses the outputs of one engine."""

    def __init__(self, tokenizer: Tokenizer | None, reasoning: str | None, tool_calls: str | None) -> None:
        """ValueError if the model's tokenizer does not allow it.

        Args:
            reasoning: the option reasoning_parser; None: thinking stays in the text.
            tool_calls: the option tool_call_parser; None: calls of tools stay in the text.
        """
        self.thinking = None if reasoning is None else ThinkingTokens(tokenizer)
        if tokenizer is None:
            raise ValueError("tool_call_parser reads texts, and this model has no tokenizer: leave the option out")
        self._tokenizer = tokenizer
        self._tool_calls = tool_calls

    def parse(self, seq: Sequence, output: Output) -> None:
        """Add the keys `reasoning` and `tool_calls` that were asked for to an output, and take them out of its text."""
        if self.thinking is not None:
            output["reasoning"] = None
            if seq.params.detokenize:
                self._split_thinking(self.thinking, seq, output)
        if self._tool_calls is not None:
            output["text"], output["tool_calls"] = split_tool_calls(self._tool_calls, output["text"])

    def _split_thinking(self, thinking: ThinkingTokens, seq: Sequence, output: Output) -> None:
        token_ids = seq.output_token_ids
        # With a grammar only the end of the thinking itself may begin the answer: the grammar begins there, too.
        place = thinking.find_answer(seq.prompt_token_ids, token_ids, seq.prompt, ends_with_call=seq.grammar is None)
        if place is None:
            return
        start, end, answer = place
        if answer == len(token_ids) and token_ids[-1:] != [thinking.close]:
            # The thinking was cut, or a stop ended it. The text is without that stop.
            reasoning = read_text(seq, self._tokenizer, start)
            text = ""
        else:
            # The text without the stop string is shorter than the thinking if the stop string begins within it.
            length = len(read_text(seq, self._tokenizer, start))
            reasoning = self._tokenizer.decode(token_ids[start:end], seq.params.skip_special_tokens)[:length]
            text = read_text(seq, self._tokenizer, answer)
        output["reasoning"] = reasoning.strip("\n")
        # A grammar's text stays as it is. Otherwise models write an empty line between thinking and answer.
        output["text"] = text if seq.grammar is not None else text.lstrip("\n")
