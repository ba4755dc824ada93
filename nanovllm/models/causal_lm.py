"""What the runner asks of a model."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor, nn

from nanovllm.backends import AttentionMetadata, Backend, KVCache
from nanovllm.layers.parallel import Parallel
from nanovllm.layers.weights import NamedTargets
from nanovllm.models.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class CausalLM(Protocol):
    """The model of one rank: an nn.Module whose parameters the loader fills."""

    def __call__(self, token_ids: Tensor, positions: Tensor, caches: list[KVCache], meta: AttentionMetadata) -> Tensor:
        """token_ids, positions [num_tokens] -> hidden states [num_tokens, hidden], normed."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """hidden [n, hidden] -> logits [n, vocab] on rank 0, None on the others."""
        ...

    def abridged(self) -> AbstractContextManager[int]:
        """For as long as this lasts, the model has one layer of each kind, the number that is given: a short look at
        them shows every kernel."""
        ...

    def weight_targets(self, names: Collection[str] = ()) -> NamedTargets:
        """(checkpoint name, target) of everything that the model needs.

        Args:
            names: of the checkpoint's tensors, where it may have one of several forms.
        """
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def modules(self) -> Iterator[nn.Module]: ...


def make_model(hf_config: "PretrainedConfig", backend: Backend, parallel: Parallel, max_model_len: int) -> CausalLM:
    """One rank's share of the model, its parameters empty, for inference."""
    return cast(CausalLM, Decoder(hf_config, backend, parallel, max_model_len).eval())
