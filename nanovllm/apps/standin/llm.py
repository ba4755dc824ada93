"""The names that `vllm` has: ours, but with vLLM's defaults, and vLLM's meaning where ours is another one."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import nanovllm
from nanovllm import llm, sampling_params
from nanovllm.apps import ported
from nanovllm.apps.async_llm import AsyncLLM, RequestOutputKind
from nanovllm.engine.claim import State
from nanovllm.load import read_generation_config
from nanovllm.models.weight_reader import checkpoint_files
from nanovllm.utils.checks import as_choice
from nanovllm.utils.foreign_names import explain_missing
from nanovllm.utils.vllm_names import ACCEPTED, ADVICE, LISTED


class SamplingParams(sampling_params.SamplingParams):
    """Without max_tokens a request has 16. All fields have names, because vLLM's have another order."""

    __slots__ = ("output_kind",)  # AsyncLLM reads it
    __annotations__ = {**sampling_params.SamplingParams.__annotations__, **ACCEPTED["SamplingParams"]}
    """Clients leave out, without a word, what has no name here. So the fields of vLLM's that are refused have one."""

    def __init__(self, *, output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **fields: Any) -> None:
        super().__init__(**{"max_tokens": 16, **fields})
        self.output_kind = output_kind

    def clone(self) -> "SamplingParams":
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return type(self)(output_kind=self.output_kind, **fields)


class LLM(llm.LLM):
    """vLLM's LLM, with the attributes through which trainers and evaluations reach into it."""

    def __init__(self, model: Any, *, profiler_config: Any = None, **options: Any) -> None:
        profiler = {"profiler": "torch", "torch_profiler_dir": os.environ.get("VLLM_TORCH_PROFILER_DIR")}
        profiler.update(profiler_config or {})
        as_choice(profiler["profiler"], "the profiler of profiler_config", ["torch"])
        super().__init__(model, **options)
        self._trace_folder = profiler["torch_profiler_dir"]
        self._embeds = options.get("runner") == "pooling"
        facts = self.engine.facts
        if not facts.refused_defaults:
            found = read_generation_config(facts.origin if isinstance(facts.origin, Path) else None)[0]
            self.engine.facts = replace(facts, default_params=SamplingParams.from_generation_config(found))

    def score(self, prompts: Any, continuations: Any, use_tqdm: bool = True, **others: Any) -> Any:
        """Return how alike texts are: the cosine of their vectors, which vLLM's score() is for models that embed."""
        if not self._embeds:
            raise NotImplementedError(
                "vLLM's score() is how relevant a text is: with runner='pooling' it is the cosine of two vectors; in "
                "nanovllm itself score() is the log-probability of a text after another one"
            )
        texts = [[given] if isinstance(given, str) else given for given in (prompts, continuations)]
        left, right = ([one.embedding for one in self.embed(given, use_tqdm, **others)] for given in texts)
        left *= len(right) if len(left) == 1 else 1
        if len(left) != len(right):
            raise ValueError(f"score() has {len(left)} texts for {len(right)}; give one for all, or one each")
        return [SimpleNamespace(outputs=SimpleNamespace(score=float(a @ b))) for a, b in zip(left, right, strict=True)]

    @cached_property
    def _profile(self) -> torch.profiler.profile:
        if self._trace_folder is None:
            raise ValueError("give profiler_config={'profiler': 'torch', 'torch_profiler_dir': FOLDER} to LLM")
        return torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler(self._trace_folder))

    def start_profile(self) -> None:
        """Trace this process: a rank that is another process is not in the file."""
        self._profile.start()

    def stop_profile(self) -> None:
        self._profile.stop()

    def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = (), **others: Any) -> None:
        """Read the weights of the model's folder, for an LLM with load_format="dummy". No other call is answered."""
        if method == "reload_weights" and not others:
            for path in checkpoint_files(Path(self.engine.facts.origin)):
                self.load_weights(load_file(path).items(), finish=False)
            self.load_weights([])
        elif (method, args) != ("update_config", ({"load_config": {"load_format": "auto"}},)):
            raise explain_missing("LLM", "collective_rpc")

    @cached_property
    def llm_engine(self) -> ported.LLMEngine:
        return ported.LLMEngine(self)

    def reset_prefix_cache(self, *args: Any, **options: Any) -> bool:
        """Finish a load of weights, too: trainers give them one by one, and call this last."""
        if self.engine.claim.state is State.LOADING:
            self.load_weights([])
        return super().reset_prefix_cache(*args, **options)


NAMES: Mapping[str, Any] = {
    **{name: getattr(nanovllm, name) for name in nanovllm.__all__},
    **ported.NAMES,
    "LLM": LLM,
    "SamplingParams": SamplingParams,
    "AsyncLLM": AsyncLLM,
    "AsyncLLMEngine": AsyncLLM,
    "RequestOutputKind": RequestOutputKind,
    "current_platform": SimpleNamespace(is_cuda=torch.cuda.is_available, is_rocm=lambda: False),
    "get_tokenizer": AutoTokenizer.from_pretrained,
}

UNCALLED = (
    *("BeamSearchParams", "ClassificationRequestOutput", "KVTransferConfig", "NCCLTrainerSendWeightsArgs"),
    *("NCCLWeightTransferEngine", "PoolerConfig", "PoolingRequestOutput", "ScoringRequestOutput"),
    *("WeightTransferConfig", "get_ip", "packed_nccl_broadcast_producer", "trainer_init"),
)
"""Names that clients import, and that most of them never call. A call raises an error."""


@cache
def find_name(name: str) -> Any:
    """Return what stands for a name of vLLM's, whatever module it is imported from; AttributeError if nothing does."""
    if name in NAMES:
        return NAMES[name]
    if name not in UNCALLED:
        raise explain_missing("nanovllm, which is vllm here,", name)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"nanovllm, which is vllm here, has no {name}: {ADVICE.get(name, LISTED)}")

    return type(name, (), {"__init__": refuse})
