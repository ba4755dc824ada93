"""The names that `vllm` has: ours, but with vLLM's defaults, and vLLM's meaning where ours is another one."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import nanovllm
from nanovllm.apps.standin import engine
from nanovllm.apps.standin.async_llm import AsyncLLM
from nanovllm.apps.standin.names import ADVICE, LISTED, explain_missing, with_others
from nanovllm.apps.standin.params import PoolingParams, RequestOutputKind, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.claim import State
from nanovllm.engine.sequence import Request
from nanovllm.features.gguf.model import GgufModel
from nanovllm.models.hub import is_gguf
from nanovllm.models.model_folder import ModelFolder
from nanovllm.outputs import Classification, Embedding
from nanovllm.text.prompts import list_prompts, tokenise_prompts
from nanovllm.utils.checks import as_choice, as_integer


class LLM(nanovllm.LLM):
    """vLLM's LLM, with the attributes through which trainers and evaluations reach into it."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        if not (facts := self.engine.facts).refused_defaults:
            folder = GgufModel if is_gguf(str(facts.origin)) else ModelFolder
            found = folder(Path(facts.origin)).generation
            self.engine.facts = replace(facts, default_params=SamplingParams.from_generation_config(found))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLM":
        """Make an LLM from options in one object."""
        return cls(**vars(engine_args))

    def __getattr__(self, name: str) -> Any:
        raise explain_missing("LLM", name)

    llm_engine = cached_property(engine.LLMEngine)
    model_config = property(attrgetter("llm_engine.model_config"))
    generate = with_others(nanovllm.LLM.generate)
    chat = with_others(nanovllm.LLM.chat)
    sleep = with_others(nanovllm.LLM.sleep)
    wake_up = with_others(nanovllm.LLM.wake_up)
    _embed = with_others(nanovllm.LLM.embed)
    _reset_prefix_cache = with_others(nanovllm.LLM.reset_prefix_cache)

    def prepare_requests(self, prompts: Seq[Any], sampling_params: Any, **options: Any) -> list[Request]:
        """Ignore stop_token_ids above the vocabulary, as vLLM does: clients give those of several models."""
        if isinstance(sampling_params, list | tuple):
            known: Any = [self._drop_unknown_ids(params) for params in sampling_params]
        else:
            known = self._drop_unknown_ids(sampling_params)
        return super().prepare_requests(prompts, known, **options)

    def _drop_unknown_ids(self, params: Any) -> Any:
        ids = getattr(params, "stop_token_ids", None) or ()
        known = [i for i in ids if i < self.engine.config.vocab_size]
        return params if len(known) == len(ids) else replace(params, stop_token_ids=known)

    def embed(
        self,
        prompts: Any,
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Embedding]:
        """Return vectors. Of longer prompts the first `truncate_prompt_tokens` tokens count; -1 means max_model_len.

        Args:
            tokenization_kwargs: may have `truncate_prompt_tokens` as well.
        """
        if isinstance(pooling_params, PoolingParams):
            options["dimensions"] = pooling_params.dimensions
            options["normalize"] = pooling_params.use_activation is not False
        elif pooling_params is not None:
            options["pooling_params"] = pooling_params
        others = dict(tokenization_kwargs or {})
        truncate_prompt_tokens = others.pop("truncate_prompt_tokens", truncate_prompt_tokens)
        if others:
            options["tokenization_kwargs"] = others
        if truncate_prompt_tokens is not None:
            most = self.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
            most = as_integer(most, "truncate_prompt_tokens", 1, self.max_model_len, "-1, or 1 to max_model_len")
            listed = list_prompts(prompts)
            read = tokenise_prompts(listed, self.engine.tokenizer)
            prompts = [
                prompt if len(tokens.token_ids) <= most else tokens.token_ids[:most]
                for prompt, tokens in zip(listed, read, strict=True)
            ]
        embeddings: list[Embedding] = self._embed(prompts, use_tqdm, **options)
        return embeddings

    def encode(self, prompts: Any, *, pooling_task: str | None = None, **options: Any) -> list["Pooled"]:
        """Return what `embed` does, in vLLM's form for all kinds of pooling. The kind must be "embed"."""
        as_choice(pooling_task, "pooling_task", ["embed"])
        return [Pooled(embedding) for embedding in self.embed(prompts, **options)]

    def reward(self, prompts: Any, **options: Any) -> list["Rewarded"]:  # type: ignore[override]
        """Return what `classify` does, in vLLM's form for rewards: `output.outputs.data`."""
        return [Rewarded(one) for one in self.classify(prompts, **options)]

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Take the chat template of a tokenizer that has the model's own tokens."""
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError("set_tokenizer got a tokenizer with other tokens: give LLM its folder as tokenizer=")
        self.tokenizer.chat_template = tokenizer.chat_template

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
        return bool(self._reset_prefix_cache(*args, **options))


class Pooled(Embedding):
    """vLLM's PoolingRequestOutput, with the vector as a tensor: `output.outputs.data`."""

    @property
    def data(self) -> torch.Tensor:
        return torch.from_numpy(self.embedding)


class Rewarded(Classification):
    """vLLM's PoolingRequestOutput of a model that scores, with the scores as a tensor: `output.outputs.data`."""

    @property
    def data(self) -> torch.Tensor:
        return torch.from_numpy(self.scores)


class RequestCounter:
    """vLLM's counter of requests."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1

    def reset(self) -> None:
        self.counter = 0


class Worker:
    """Stands for a class of vLLM's whose methods scripts replace. Nothing calls them."""

    def _assert_memory_footprint_increased_during_profiling(self) -> None:
        pass


class Platform:
    """Tells what the machine has, as vLLM's `current_platform` does."""

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    is_rocm = is_tpu = is_xpu = staticmethod(lambda: False)

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"


def set_random_seed(seed: int) -> None:
    """Call transformers' set_seed. Its module imports the trainer and peft, which takes seconds, and so comes late."""
    from transformers import set_seed

    set_seed(seed)


class Uncalled(type):
    """Makes a class that raises an error when it is called."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        advice = ADVICE.get(cls.__name__, LISTED)
        raise NotImplementedError(f"nanovllm, which is vllm here, has no {cls.__name__}: {advice}")


UNCALLED = (
    *("BeamSearchParams", "ClassificationRequestOutput", "KVTransferConfig", "NCCLTrainerSendWeightsArgs"),
    *("NCCLWeightTransferEngine", "PoolerConfig", "ScoringRequestOutput"),
    *("WeightTransferConfig", "get_ip", "packed_nccl_broadcast_producer", "trainer_init"),
)
"""Names that clients import, and that most of them never call."""

NAMES: dict[str, Any] = {
    **{name: getattr(nanovllm, name) for name in nanovllm.__all__},
    **engine.NAMES,
    **{made.__name__: made for made in (LLM, SamplingParams, PoolingParams, AsyncLLM, RequestOutputKind)},
    "PoolingRequestOutput": Pooled,
    **{name: Uncalled(name, (), {}) for name in UNCALLED},
    "AsyncLLMEngine": AsyncLLM,
    "Worker": Worker,
    "current_platform": Platform(),
    "get_tokenizer": AutoTokenizer.from_pretrained,
    "set_random_seed": set_random_seed,
}
"""They do not depend on the module of vLLM's that a script imports them from."""

OWN_NAMES = {"vllm.utils": {"Counter": RequestCounter}, "vllm.utils.counter": {"Counter": RequestCounter}}
"""{module: names that are others there}."""
