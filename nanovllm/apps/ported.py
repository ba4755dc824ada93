"""Finds what scripts for vLLM import and we do not have: names that stand for something here, and their modules.

`nanovllm` asks this file for a name or a module that is nowhere else. It is an application: nothing of the engine
imports it.
"""

import gc
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from enum import Enum
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig, EngineOptions
from nanovllm.inputs import LoRARequest, PoolingParams, translate_arguments
from nanovllm.outputs import METRICS, Embedding, Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt
from nanovllm.utils.foreign_names import explain_missing
from nanovllm.utils.vllm_names import ADVICE, INNER, LISTED, MODULES

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


class FlexibleArgumentParser(ArgumentParser):
    """vLLM's name for a parser of a command line."""


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


class RequestOutputKind(Enum):
    """vLLM's name for how often a request has outputs. Here it is once, when it ends."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _print_embeddings(embeds: Any, prefix: str = "Embeddings") -> None:
    sys.stdout.write(f"{prefix}: {embeds[:4]} (the first of {len(embeds)} elements)\n")


NAMES: Mapping[str, Any] = {
    "EngineArgs": EngineArgs,
    "FlexibleArgumentParser": FlexibleArgumentParser,
    "RequestOutputKind": RequestOutputKind,
    **dict.fromkeys(("EmbeddingRequestOutput", "EmbeddingOutput"), Embedding),
    "PromptType": Prompt,
    "PoolingParams": PoolingParams,
    "LoRARequest": LoRARequest,
    "LLMEngine": LLMEngine,
    **METRICS,
    "ProfilerConfig": dict,  # the option profiler_config refuses it
    "init_logger": logging.getLogger,
    "print_embeddings": _print_embeddings,
    "cleanup_dist_env_and_memory": gc.collect,  # an LLM frees its memory when it is collected
}
"""Names of vLLM's that stand for something here, whatever module a script imports them from."""


def find_name(name: str) -> Any:
    """Return what a name of vLLM's stands for here; AttributeError with advice if we do not have it."""
    if name not in NAMES:
        raise explain_missing("module 'nanovllm'", name)
    return NAMES[name]


def find_module(name: str) -> ModuleSpec | None:
    """Answer Python, which has found a module nowhere: see `nanovllm._Finder`.

    After `from module import name` Python asks for the name, too, if the module has a path.

    Raises:
        ImportError: vLLM has it, and we do not.
    """
    parent, _, last = name.rpartition(".")
    if name.removeprefix("nanovllm.") in MODULES:
        return ModuleSpec(name, None, is_package=True)
    if last in NAMES:
        setattr(sys.modules[parent], last, NAMES[last])  # `from` looks there again when no module was found
    elif advice := _advise(name):
        raise ImportError(f"{parent} has no {last!r}: {advice}", name=name)
    return None


def _advise(name: str) -> str | None:
    """Return the advice for a module or a name in it. Classes are vLLM's, and all but a few modules of `v1`."""
    last = name.rpartition(".")[2]
    rest = INNER if name.startswith("nanovllm.v1.") else LISTED if last[0].isupper() else None
    return ADVICE.get(last, rest)
