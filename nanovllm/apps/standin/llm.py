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
from nanovllm.load import read_generation_config
from nanovllm.models.weight_reader import checkpoint_files
from nanovllm.utils.checks import as_choice
from nanovllm.utils.foreign_names import explain_missing
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

    def __init__(self, model: Any, *, profiler_config: Any = None, **options: Any) -> None:
        self._profiler = {"profiler": "torch", "torch_profiler_dir": None, **(profiler_config or {})}
        as_choice(self._profiler["profiler"], "the profiler of profiler_config", ["torch"])
        super().__init__(model, **options)
        self._embeds = options.get("runner") == "pooling"
        facts = self.engine.facts
        if not facts.refused_defaults:
            found = read_generation_config(facts.origin if isinstance(facts.origin, Path) else None)[0]
            self.engine.facts = replace(facts, default_params=SamplingParams.from_generation_config(found))

    def score(self, prompts: Any, continuations: Any, use_tqdm: bool = True, **others: Any) -> Any:
        """Return how alike texts are: the cosine of their vectors, which vLLM's score() is for models that embed."""
        if not self._embeds:
            raise NotImplementedError(
                "vLLM's score() is a relevance, nanovllm's a log-probability; with runner='pooling' it is a cosine"
            )
        both = (self.embed(texts, use_tqdm, **others) for texts in (prompts, continuations))
        left, right = ([one.embedding for one in outputs] for outputs in both)
        left *= len(right) if len(left) == 1 else 1
        if len(left) != len(right):
            raise ValueError(f"score() has {len(left)} texts for {len(right)}; give one for all, or one each")
        return [SimpleNamespace(outputs=SimpleNamespace(score=float(a @ b))) for a, b in zip(left, right, strict=True)]

    def start_profile(self) -> None:
        """Trace this process: a rank that is another process is not in the file."""
        folder = self._profiler["torch_profiler_dir"]
        if folder is None:
            raise ValueError("give profiler_config={'profiler': 'torch', 'torch_profiler_dir': FOLDER} to LLM")
        self._profile = torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler(folder))
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


def refuse_calls(name: str) -> type:
    """Return a class that raises an error when it is called."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"nanovllm, which is vllm here, has no {name}: {ADVICE.get(name, LISTED)}")

    return type(name, (), {"__init__": refuse})


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
    **{name: refuse_calls(name) for name in UNCALLED},
    "AsyncLLMEngine": AsyncLLM,
    "current_platform": SimpleNamespace(is_cuda=torch.cuda.is_available, is_rocm=lambda: False),
    "get_tokenizer": AutoTokenizer.from_pretrained,
}
"""They do not depend on the module of vLLM's that a script imports them from."""
