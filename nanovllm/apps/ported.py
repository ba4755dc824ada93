"""Finds names of vLLM's that scripts import from nanovllm, and that stand for something here.

`nanovllm` asks this file for a name that it does not have. It is an application: nothing of the engine imports it.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig, EngineOptions
from nanovllm.inputs import PoolingParams, translate_arguments
from nanovllm.outputs import Embedding, Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt
from nanovllm.utils.foreign_names import explain_missing

if TYPE_CHECKING:
    from nanovllm.llm import LLM


class EngineArgs(EngineConfig):
    """vLLM's name for options in one object: `LLM.from_engine_args(args)`, or `LLM(**vars(args))`."""

    def __init__(self, model: str, **options: Any) -> None:
        vars(self).update(vars(EngineConfig.from_options(model, options)))

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Add all options, with their defaults, to a parser of a command line."""
        from nanovllm.apps.cli import add_engine_options

        add_engine_options(parser, without=())
        defaults = {name: getattr(EngineConfig, name) for name in EngineOptions.__annotations__}
        parser.set_defaults(model="Qwen/Qwen3-0.6B", **defaults)  # as in vLLM
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> "EngineArgs":
        """Return the options among the arguments that a parser has read."""
        return cls(args.model, **{name: getattr(args, name) for name in EngineOptions.__annotations__})


class LLMEngine:
    """vLLM's name for the loop of `LLM.step`. Each request has an output once, when all its completions have ended."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._names: dict[int, str] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLMEngine":
        from nanovllm.llm import LLM

        return cls(LLM.from_engine_args(engine_args))

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, **others: Any) -> None:
        """Queue a request for `step`."""
        translate_arguments(type(self._llm).add_request, others)
        request = self._llm.prepare(prompt, params)
        with self._llm.claim_loop("add_request()"):
            self._names[self._llm.engine.add(request).seq_id] = request_id

    def step(self) -> list[Output]:
        """Run one step. Return the outputs of the requests that it has ended."""
        engine = self._llm.engine
        with self._llm.claim_loop("step()"):
            outputs = [engine.make_output(seq) for seq in (engine.step() if engine.has_work else ())]
        for output in outputs:
            output.request_id = self._names.pop(int(output.request_id))
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether requests run or wait."""
        return not self._llm.is_finished()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


NAMES: Mapping[str, Any] = {
    "EngineArgs": EngineArgs,
    **dict.fromkeys(("EmbeddingRequestOutput", "EmbeddingOutput"), Embedding),
    "PromptType": Prompt,
    "PoolingParams": PoolingParams,
    "LLMEngine": LLMEngine,
}
"""Names of vLLM's that stand for something here."""


def find_name(name: str, ours: Collection[str]) -> Any:
    """Return what a name of vLLM's stands for here; AttributeError with advice if we do not have it.

    Args:
        ours: the names that `nanovllm` has itself.
    """
    if name not in NAMES:
        raise explain_missing("module 'nanovllm'", name, ours)
    return NAMES[name]
