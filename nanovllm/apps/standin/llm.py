"""The names that `vllm` has: ours, but with vLLM's defaults, and vLLM's meaning where ours is another one."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import nanovllm
from nanovllm.apps import ported
from nanovllm.apps.async_llm import AsyncLLM, RequestOutputKind
from nanovllm.engine.claim import State
from nanovllm.models.model_folder import ModelFolder
from nanovllm.utils.vllm_names import ACCEPTED, ADVICE, LISTED


class SamplingParams(nanovllm.SamplingParams):
    """Without max_tokens a request has 16. All fields have names, because vLLM's have another order."""

    __slots__ = ("output_kind",)  # AsyncLLM reads it
    __annotations__ = {**nanovllm.SamplingParams.__annotations__, **ACCEPTED["SamplingParams"]}
    """Clients leave out, without a word, what has no name here. So the fields of vLLM's that are refused have one."""

    def __init__(self, *, output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **fields: Any) -> None:
        super().__init__(**{"max_tokens": 16, **fields})
        self.output_kind = output_kind

    def clone(self) -> "SamplingParams":
        return replace(self, output_kind=self.output_kind)  # type: ignore[call-arg]


class LLM(nanovllm.LLM):
    """vLLM's LLM, with the attributes through which trainers and evaluations reach into it."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        if not (facts := self.engine.facts).refused_defaults:
            found = ModelFolder(Path(facts.origin)).generation
            self.engine.facts = replace(facts, default_params=SamplingParams.from_generation_config(found))

    llm_engine = cached_property(ported.LLMEngine)

    def score(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("vLLM's score() is a relevance, and nanovllm's a log-probability")

    def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = (), **others: Any) -> None:
        """Read the weights of the model's folder, for an LLM with load_format="dummy". No other call is answered."""
        if method == "reload_weights" and not others:
            for path in ModelFolder(Path(self.engine.facts.origin)).files:
                self.load_weights(load_file(path).items(), finish=False)
            self.load_weights([])
        elif (method, args) != ("update_config", ({"load_config": {"load_format": "auto"}},)):
            raise NotImplementedError(f"collective_rpc({method!r}) is not answered: {ADVICE['collective_rpc']}")

    def reset_prefix_cache(self, *args: Any, **options: Any) -> bool:
        """Finish a load of weights, too: trainers give them one by one, and call this last."""
        if self.engine.claim.state is State.LOADING:
            self.load_weights([])
        return super().reset_prefix_cache(*args, **options)


class Uncalled(type):
    """Makes a class that raises an error when it is called."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        advice = ADVICE.get(cls.__name__, LISTED)
        raise NotImplementedError(f"nanovllm, which is vllm here, has no {cls.__name__}: {advice}")


UNCALLED = (
    *("BeamSearchParams", "ClassificationRequestOutput", "KVTransferConfig", "NCCLTrainerSendWeightsArgs"),
    *("NCCLWeightTransferEngine", "PoolerConfig", "PoolingRequestOutput", "ScoringRequestOutput"),
    *("WeightTransferConfig", "get_ip", "packed_nccl_broadcast_producer", "trainer_init"),
)
"""Names that clients import, and that most of them never call."""

NAMES: dict[str, Any] = {
    **{name: getattr(nanovllm, name) for name in nanovllm.__all__},
    **ported.NAMES,
    **{made.__name__: made for made in (LLM, SamplingParams, AsyncLLM, RequestOutputKind)},
    **{name: Uncalled(name, (), {}) for name in UNCALLED},
    "AsyncLLMEngine": AsyncLLM,
    "current_platform": SimpleNamespace(is_cuda=torch.cuda.is_available, is_rocm=lambda: False),
    "get_tokenizer": AutoTokenizer.from_pretrained,
}
"""They do not depend on the module of vLLM's that a script imports them from."""
