"""Decode steps on a CPU, recorded: the kernels of a step are called again, without the Python between them."""

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.backends import AttentionMetadata, LayerCache
from nanovllm.kernels.cpu_library import Call, record_calls, repeat_calls
from nanovllm.kernels.scratch import Scratch, borrow_from
from nanovllm.models.decoder import Decoder

MOST_SEQS = 64
"""The most sequences of a recorded step. In a larger one the Python between the kernels takes next to nothing."""

PLACES = ("cu_seqlens_q", "seq_lens", "block_tables", "slot_mapping", "rows")
"""The tensors of `AttentionMetadata` that the kernels read."""


class RecordedStep(NamedTuple):
    """A step of n sequences. The calls read `inputs` and write `hidden` [n, hidden], always at the same addresses."""

    inputs: tuple[Tensor, ...]
    calls: list[Call]
    hidden: Tensor


class RecordedSteps:
    """Runs a model like the model itself, but records its first decode step of each size, and then repeats the calls.

    Python prepares a few hundred calls of kernels in a step: for a small model that takes longer than the kernels. What
    it prepares depends on the number of sequences alone, but for the addresses of inputs and results. So recorded steps
    have places of their own for these, and each step's inputs are copied there. The steps share the memory of their
    results, because only one runs at a time. Only the hidden states of each size keep memory of their own. They must be
    read before the next step of this size runs.

    Operators of torch are not recorded. If a step calls one, it cannot be repeated, and no step is recorded from then
    on.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._scratch = Scratch(keeps_all=True)
        self._steps: dict[int, RecordedStep] = {}
        self._can_record = True

    def __call__(
        self, token_ids: Tensor, positions: Tensor, caches: list[LayerCache], meta: AttentionMetadata
    ) -> Tensor:
        """Do what `Decoder.forward` does. The caches are the same ones in every call."""
        num_seqs = len(meta.seq_lens)
        if not self._can_record or meta.num_decodes != num_seqs or num_seqs > MOST_SEQS:
            return self._model(token_ids, positions, caches, meta)  # type: ignore[no-any-return]
        assert self._model.embed_tokens is not None
        x = self._model.embed_tokens(token_ids)
        inputs = (x, positions, *(getattr(meta, name) for name in PLACES))
        step = self._steps.get(num_seqs)
        if step is not None:
            for target, value in zip(step.inputs, inputs, strict=True):
                target.copy_(value)
            repeat_calls(step.calls)
            return step.hidden
        kept = tuple(value.clone() for value in inputs)
        x, positions, *places = kept
        meta = replace(meta, **dict(zip(PLACES, places, strict=True)))
        with borrow_from(self._scratch), record_calls() as calls, _TorchWatch() as watch:  # type: ignore[no-untyped-call]
            hidden: Tensor = self._model(token_ids, positions, caches, meta, x)
        if watch.computes:
            self._can_record = False
        else:
            self._steps[num_seqs] = RecordedStep(kept, calls, hidden)
        return hidden

    def forget(self) -> None:
        """Forget all steps, because weights are at other addresses now."""
        self._steps.clear()


class _TorchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches whether torch itself computes or copies, or only makes views of tensors.

    Attributes:
        computes: whether it did more than that.
    """

    computes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # In inference mode `contiguous`, `to` and `reshape` come whole. Only their parts show whether they copy.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        self.computes = self.computes or not func.is_view
        return func(*args, **kwargs)
