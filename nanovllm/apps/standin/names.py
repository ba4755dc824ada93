"""Holds what stands for vLLM's names: with its defaults where ours differ, and an error where the meaning differs."""

import gc
import logging
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from enum import Enum
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from transformers import AutoTokenizer

import nanovllm
from nanovllm import llm, sampling_params
from nanovllm.apps import ported
from nanovllm.engine.claim import State
from nanovllm.load import read_generation_config
from nanovllm.outputs import METRICS, Logprob, Metric
from nanovllm.utils.foreign_names import explain_missing
from nanovllm.utils.vllm_names import ACCEPTED, ADVICE, LISTED


class SamplingParams(sampling_params.SamplingParams):
    """Without max_tokens a request has 16. All fields have names, because vLLM's have another order."""

    __slots__ = ()
    __annotations__ = {**sampling_params.SamplingParams.__annotations__, **ACCEPTED["SamplingParams"]}
    """Clients leave out, without a word, what has no name here. So the fields of vLLM's that are refused have one."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"max_tokens": 16, **fields})


class LLM(llm.LLM):
    """vLLM's LLM, with the attributes through which trainers and evaluations reach into it."""

    def prepare_requests(self, prompts: Any, sampling_params: Any, **others: Any) -> Any:
        defaults = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return super().prepare_requests(prompts, defaults, **others)

    def get_default_sampling_params(self) -> sampling_params.SamplingParams:
        super().get_default_sampling_params()  # raises an error if a request cannot have them
        folder = Path(self.engine.facts.origin)
        return SamplingParams.from_generation_config(read_generation_config(folder)[0])

    def score(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "vLLM's score() is how relevant a text is, which a model with a head of its own says; in nanovllm itself "
            "score() is the log-probability of a text after another one"
        )

    @cached_property
    def llm_engine(self) -> "LLMEngine":
        return LLMEngine(self)

    def reset_prefix_cache(self, **others: Any) -> bool:
        """Finish a load of weights, too: trainers give them one by one, and call this last."""
        if self.engine.claim.state is State.LOADING:
            self.load_weights([])
        return super().reset_prefix_cache(**others)


class LLMEngine(ported.LLMEngine):
    """Adds what clients read: the model's length, and the hook through which trainers give new weights."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.model_config = SimpleNamespace(max_model_len=llm.max_model_len)
        alone = SimpleNamespace(data_parallel_rank=0, data_parallel_size=1)  # to its caller: it shares requests itself
        self.vllm_config = SimpleNamespace(model_config=self.model_config, parallel_config=alone)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=partial(llm.load_weights, finish=False)))
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLMEngine":
        return cls(LLM(**vars(engine_args)))


RequestOutputKind = Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"], start=0)
"""How often a request has outputs. Here it is once, when it ends."""


def resolve_chat_template(tokenizer: Any, chat_template: str | None = None, *_: Any, **__: Any) -> str | None:
    return chat_template or tokenizer.chat_template


def get_open_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def print_embeddings(embeds: Any, prefix: str = "Embeddings") -> None:
    sys.stdout.write(f"{prefix}: {embeds[:4]} (the first of {len(embeds)} elements)\n")


NAMES: Mapping[str, Any] = {
    **{name: getattr(nanovllm, name) for name in nanovllm.__all__},
    **ported.NAMES,
    **METRICS,
    **{made.__name__: made for made in (SamplingParams, LLM, LLMEngine, RequestOutputKind, Logprob, Metric)},
    **dict.fromkeys(("resolve_chat_template", "resolve_hf_chat_template"), resolve_chat_template),
    **dict.fromkeys(("SampleLogprobs", "PromptLogprobs"), list),
    **dict.fromkeys(("cleanup_dist_env_and_memory", "destroy_model_parallel"), gc.collect),
    "destroy_distributed_environment": gc.collect,  # an LLM frees its memory when it is collected
    "current_platform": SimpleNamespace(is_cuda=torch.cuda.is_available, is_rocm=lambda: False),
    "FlexibleArgumentParser": ArgumentParser,
    "ProfilerConfig": dict,  # the option profiler_config refuses it
    "get_open_port": get_open_port,
    "get_tokenizer": AutoTokenizer.from_pretrained,
    "init_logger": logging.getLogger,
    "print_embeddings": print_embeddings,
}
"""Names of vLLM's that stand for something here, whatever module a client imports them from."""

UNCALLED = (
    *("AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "BeamSearchParams", "ClassificationRequestOutput", "get_ip"),
    *("KVTransferConfig", "NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine", "packed_nccl_broadcast_producer"),
    *("PoolerConfig", "PoolingRequestOutput", "ScoringRequestOutput", "trainer_init", "WeightTransferConfig"),
)
"""Names that clients import, and that most of them never call. A call raises an error."""


@cache
def find_name(name: str) -> Any:
    """Return what stands for a name of vLLM's; AttributeError with advice if nothing does."""
    if name in NAMES:
        return NAMES[name]
    if name not in UNCALLED:
        raise explain_missing("nanovllm, which is vllm here,", name)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"nanovllm, which is vllm here, has no {name}: {ADVICE.get(name, LISTED)}")

    return type(name, (), {"__init__": refuse})
