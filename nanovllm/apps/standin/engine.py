"""vLLM's engine and options in one object, and small names of vLLM's that stand for something here."""

import gc
import logging
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from nanovllm.apps.standin.names import check_arguments, explain_missing
from nanovllm.config import DEFAULT_NUM_SEQS, EngineConfig, EngineOptions
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import METRICS, Classification, Embedding, Logprob, Metric, Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Message, Prompt

if TYPE_CHECKING:
    from nanovllm.apps.standin.llm import LLM


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

    def create_engine_config(self) -> SimpleNamespace:
        """Return what Ray's processor reads of vLLM's configuration: limits that are options here."""
        scheduler = SimpleNamespace(max_num_seqs=self.max_num_seqs or DEFAULT_NUM_SEQS)
        return SimpleNamespace(scheduler_config=scheduler, parallel_config=self)

    def __getattr__(self, name: str) -> Any:
        raise explain_missing("EngineArgs", name)


class LLMEngine:
    """vLLM's name for the loop of `LLM.step`. Each request has an output once, when all its completions have ended.

    Its attributes are what clients read: the model's length, and the hook through which trainers give new weights.
    """

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._requests: dict[int, tuple[str, Sequence]] = {}
        """{number: its name for the caller, and its first completion}, of the requests that have not ended."""
        # Replicas have their models in other processes.
        hf_config = getattr(getattr(llm.engine.runner, "local", llm.engine.runner), "hf_config", None)
        self.model_config = SimpleNamespace(max_model_len=llm.max_model_len, hf_config=hf_config)
        alone = SimpleNamespace(data_parallel_rank=0, data_parallel_size=1)  # to its caller: it shares requests itself
        self.vllm_config = SimpleNamespace(model_config=self.model_config, parallel_config=alone)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=partial(llm.load_weights, finish=False)))
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **others: Any) -> "LLMEngine":
        from nanovllm.apps.standin.llm import LLM

        check_arguments(cls.from_engine_args, others)
        return cls(LLM.from_engine_args(engine_args))

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, **others: Any) -> None:
        """Queue a request for `step`."""
        check_arguments(type(self._llm).add_request, others)
        request = self._llm.prepare(prompt, params)
        with self._llm.claim_loop("add_request()"):
            lead = self._llm.engine.add(request)
            self._requests[lead.seq_id] = (request_id, lead)

    def step(self) -> list[Output]:
        """Run one step. Return the outputs of the requests that it has ended."""
        engine = self._llm.engine
        with self._llm.claim_loop("step()"):
            outputs = [engine.make_output(seq) for seq in (engine.step() if engine.has_work else ())]
        for output in outputs:
            output.request_id = self._requests.pop(int(output.request_id))[0]
        return outputs

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """End requests. `step` returns nothing of them. A name that no unfinished request has changes nothing.

        Args:
            internal: vLLM's; ignored, because a request has one name here.
        """
        names = [request_ids] if isinstance(request_ids, str) else [*request_ids]
        with self._llm.claim_loop("abort_request()"):
            for number, (name, lead) in [*self._requests.items()]:
                if name in names:
                    del self._requests[number]
                    for seq in (lead, *lead.others):
                        self._llm.engine.scheduler.end(seq, "abort")

    def has_unfinished_requests(self) -> bool:
        """Return whether requests run or wait."""
        return not self._llm.is_finished()

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


def resolve_chat_template(tokenizer: Any, chat_template: str | None = None, *_: Any, **__: Any) -> str | None:
    return chat_template or tokenizer.chat_template


def get_open_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def print_embeddings(embeds: Any, prefix: str = "Embeddings") -> None:
    print(f"{prefix}: {embeds[:4]} (the first of {len(embeds)} elements)")


NAMES: Mapping[str, Any] = {
    **METRICS,
    **{made.__name__: made for made in (EngineArgs, LLMEngine)},
    **{made.__name__: made for made in (Logprob, Metric)},
    **dict.fromkeys(("EmbeddingRequestOutput", "EmbeddingOutput"), Embedding),
    **dict.fromkeys(("ClassificationRequestOutput", "ClassificationOutput"), Classification),
    **dict.fromkeys(("resolve_chat_template", "resolve_hf_chat_template"), resolve_chat_template),
    **dict.fromkeys(("SampleLogprobs", "PromptLogprobs"), list),
    # An LLM frees its memory when it is collected.
    **dict.fromkeys(("cleanup_dist_env_and_memory", "destroy_model_parallel"), gc.collect),
    "destroy_distributed_environment": gc.collect,
    # What the options of the first two ask for changes speed alone, and is ignored.
    **dict.fromkeys(("AttentionConfig", "CompilationConfig", "ProfilerConfig"), SimpleNamespace),
    "CompilationMode": Enum("CompilationMode", "NONE STOCK_TORCH_COMPILE DYNAMO_TRACE_ONCE VLLM_COMPILE", start=0),
    "CUDAGraphMode": Enum("CUDAGraphMode", "NONE PIECEWISE FULL FULL_DECODE_ONLY FULL_AND_PIECEWISE", start=0),
    **dict.fromkeys(("ChatCompletionMessageParam", "ConversationMessage"), Message),
    "AsyncEngineArgs": EngineArgs,
    "FlexibleArgumentParser": ArgumentParser,
    "PromptType": Prompt,
    "get_open_port": get_open_port,
    "init_logger": logging.getLogger,
    "print_embeddings": print_embeddings,
    "random_uuid": lambda: uuid4().hex,
}
"""They do not depend on the module that a script imports them from."""
