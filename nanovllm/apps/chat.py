"""A conversation in the terminal, for a first try of a model: `nanovllm chat MODEL`."""

import sys
from contextlib import suppress
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams, change_defaults

GREETING = "Ctrl-C stops an answer, Ctrl-D ends the conversation, /new starts another one.\n"


def chat(config: EngineConfig, system: str | None, changes: dict[str, Any]) -> int:
    """Read what the user types, and write the model's answers piece by piece, until the input ends.

    Args:
        system: the system prompt, or None.
        changes: values that replace those of the model's own sampling parameters.
    """
    change_defaults(SamplingParams(), changes)  # a wrong value is refused before the model is loaded
    beginning = [{"role": "system", "content": system}] if system is not None else []
    messages = beginning
    options = vars(config).copy()
    with LLM(options.pop("model"), **options) as llm:
        params = change_defaults(llm.get_default_sampling_params(), changes)
        sys.stdout.write(GREETING)
        with suppress(EOFError):
            while True:
                text = input("> ").strip()
                if text == "/new":
                    messages = beginning
                elif text:
                    asked = [*messages, {"role": "user", "content": text}]
                    said = answer(llm, asked, params)
                    messages = [*asked, {"role": "assistant", "content": said}] if said else messages
    sys.stdout.write("\n")
    return 0


def answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Write the model's answer while it is computed, and return it: "" after an error. Ctrl-C ends it early."""
    pieces: list[str] = []
    try:
        for piece in llm.stream_tokens(llm.render_chat(messages), params):
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" (stopped)")
    except ValueError as error:  # the conversation is too long, or the model has no chat template
        sys.stdout.write(f"{error}; /new starts another conversation")
    sys.stdout.write("\n")
    return "".join(pieces)
