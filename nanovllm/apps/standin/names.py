"""What stands for vLLM's names: its defaults where ours differ, and an error where the meaning would differ."""

import gc
import logging
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

import nanovllm
from nanovllm import llm, sampling_params
from nanovllm.apps import ported
from nanovllm.load import read_generation_config
from nanovllm.outputs import METRICS, Logprob, Metric
from nanovllm.utils.foreign_names import explain_missing
from nanovllm.utils.vllm_names import ADVICE, LISTED


class SamplingParams(sampling_params.SamplingParams):
    """Without max_tokens a request has 16. All fields have names, because vLLM's have another order."""

    __slots__ = ()

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"max_tokens": 16, **fields})


class LLM(llm.LLM):
    """vLLM's LLM, with the attributes through which trainers and evaluations reach into it."""

    _is_loading = False
    """Whether `load_part` has begun a load of weights."""

    def prepare_requests(self, prompts: Any, sampling_params: Any, **others: Any) -> Any:
        defaults = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return super().prepare_requests(prompts, defaults, **others)

    def get_default_sampling_params(self) -> sampling_params.SamplingParams:
        super().get_default_sampling_params()  # raises an error if a request cannot have them
        origin = self.engine.facts.origin
        generation, _, _ = read_generation_config(origin if isinstance(origin, Path) else None)
        return SamplingParams.from_generation_config(generation)

    def score(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "vLLM's score() is how relevant a text is, which a model with a head of its own says; nanovllm's own LLM "
            "has a score() of another meaning: the log-probability of a text after another one"
        )

    @cached_property
    def llm_engine(self) -> "LLMEngine":
        return LLMEngine(self)

    def load_part(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Begin a load of weights, or go on with it. `reset_prefix_cache` finishes it, which trainers call last."""
        self._is_loading = True
        self.load_weights([(name, tensor.detach()) for name, tensor in named_tensors], finish=False)

    def reset_prefix_cache(self, **others: Any) -> bool:
        if self._is_loading:
            self._is_loading = False
            self.load_weights([])
        return super().reset_prefix_cache(**others)


class LLMEngine(ported.LLMEngine):
    """Adds what clients read: the model's length, and the hook through which trainers give new weights."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        config = llm.engine.config
        self.model_config = SimpleNamespace(max_model_len=config.max_model_len, dtype=getattr(torch, config.dtype))
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=llm.load_part))
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLMEngine":
        return cls(LLM(**vars(engine_args)))


class FlexibleArgumentParser(ArgumentParser):
    """A parser of a command line."""


class RequestOutputKind(Enum):
    """How often a request has outputs. Here it is once, when it ends."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def get_tokenizer(tokenizer_name: str, *_: Any, tokenizer_mode: str = "auto", **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name, **options)


def resolve_chat_template(tokenizer: Any, chat_template: str | None = None, *_: Any, **__: Any) -> str | None:
    return chat_template or tokenizer.chat_template


def get_open_port() -> int:
    with socket.socket() as opened:
        opened.bind(("", 0))
        return int(opened.getsockname()[1])


def print_embeddings(embeds: Any, prefix: str = "Embeddings") -> None:
    sys.stdout.write(f"{prefix}: {embeds[:4]} (the first of {len(embeds)} elements)\n")


NAMES: Mapping[str, Any] = {
    **{name: getattr(nanovllm, name) for name in nanovllm.__all__ if not name.startswith("__")},
    **ported.NAMES,
    **METRICS,
    "SamplingParams": SamplingParams,
    "LLM": LLM,
    "LLMEngine": LLMEngine,
    "FlexibleArgumentParser": FlexibleArgumentParser,
    "RequestOutputKind": RequestOutputKind,
    "Metric": Metric,
    "Logprob": Logprob,
    "SampleLogprobs": list[dict[int, Logprob]],
    "PromptLogprobs": list[dict[int, Logprob] | None],
    "ProfilerConfig": dict,  # the option profiler_config refuses it
    "get_open_port": get_open_port,
    "get_tokenizer": get_tokenizer,
    "init_logger": logging.getLogger,
    "print_embeddings": print_embeddings,
    **dict.fromkeys(("resolve_chat_template", "resolve_hf_chat_template"), resolve_chat_template),
    **dict.fromkeys(("cleanup_dist_env_and_memory", "destroy_model_parallel"), gc.collect),
    "destroy_distributed_environment": gc.collect,  # an LLM frees its memory when it is collected
}
"""Names of vLLM's that stand for something here, whatever module a client imports them from."""

UNCALLED = (
    *("AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "BeamSearchParams", "ClassificationRequestOutput", "get_ip"),
    *("KVTransferConfig", "NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine", "packed_nccl_broadcast_producer"),
    *("PoolerConfig", "PoolingRequestOutput", "ScoringRequestOutput", "trainer_init", "WeightTransferConfig"),
)
"""Names that clients import, and of which most never call any."""


@cache
def find_name(name: str) -> Any:
    """Return what stands for a name of vLLM's; AttributeError with advice if nothing does."""
    if name in NAMES:
        return NAMES[name]
    if name not in UNCALLED:
        raise explain_missing("vllm, which is nanovllm here,", name)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"vllm, which is nanovllm here, has no {name}: {ADVICE.get(name, LISTED)}")

    return type(name, (), {"__init__": refuse})
