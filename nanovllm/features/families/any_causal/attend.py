"""The attention of transformers' modules: what each of them asks for, and the engine's attention in its place.

A module looks up its function in transformers' table, and calls it with queries, keys, values, and all that its layer
wants. Nothing is read from config.json, which may say something else.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.backends import Backend, CacheSize, KVCache, LayerCache
from nanovllm.features.families.any_causal.numbers import check_cap
from nanovllm.ops.attention import AttentionVariant
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.ops.step_inputs import StepInputs

NAME = "nanovllm"
DRY_RUN = "nanovllm_dry_run"
TRIAL = "nanovllm_trial"
"""The names of `attend`, `record` and `keep` in transformers' table of attention functions."""

HARMLESS = frozenset(
    (
        *("position_ids", "cache", "past_key_values", "use_cache", "cache_position", "position_embeddings"),
        *("is_causal", "dropout", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("logits_to_keep", "num_items_in_batch", "shared_kv_states"),
    )
)
"""The arguments of a call that change nothing here. A call with any other argument is refused."""

FAR = 1 << 20
"""The position of the token for which a mask is asked about every key."""

FARTHEST = (1 << 40) + 7
"""The position of a token that sees the end of every window, also of one beyond FAR."""

CHUNKED = "its masks show chunks, not sliding windows"


@dataclass
class Step:
    """Holds what all layers share while a step runs.

    Attributes:
        inputs: the step's inputs, prepared for each form of a cache: see `AttentionLayer.form`. Empty if no step runs.
        origin: int32 [num_tokens], zeros. Where transformers has rotated queries and keys, or nobody rotates them, the
            kernel rotates by nothing.
        angles: {a tensor of cosines: its table}. transformers makes the tensors once a step, for all layers or a kind.
    """

    inputs: dict[tuple[int, ...], StepInputs] = field(default_factory=dict)
    caches: list[LayerCache] = field(default_factory=list)
    origin: Tensor = field(default_factory=lambda: torch.empty(0))
    norms: dict[int, NormRope] = field(default_factory=dict)
    """{head_dim: no norms, and a table of one row, with the cosine and the sine of 0}."""
    angles: dict[Tensor, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def find_angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return a table of angles as `NormRope` has it, and each token's row in it.

        Args:
            cos, sin: [1, num_tokens, head_dim]; both halves of a row are equal.
        """
        if cos not in self.angles:
            half = cos.shape[-1] // 2
            table = torch.cat((cos[0, :, :half], sin[0, :, :half]), 1).float()
            self.angles[cos] = (table, torch.arange(len(table), dtype=torch.int32, device=table.device))
        return self.angles[cos]


class AttentionLayer:
    """The attention of one layer, as its module asks for it.

    Attributes:
        head_dim: the least power of two, from 32, that holds a head. A backend that has kernels for a head of this size
            gets heads padded with zeros, if it has none for their own size. That changes no score and no sum.
        group: query heads per KV head.
        variant: how it differs from plain causal attention; None if it does not. Each call brings its sinks.
        source: the number of the layer whose keys and values it reads; its own number for most layers.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        source: int,
        sizes: tuple[int, int, int, int],
        variant: AttentionVariant | None,
    ) -> None:
        """
        Args:
            sizes: query heads, KV heads, elements of a key, elements of a value.
        """
        self.module = module
        self.number = number
        self.source = source
        self.num_heads, self.kv_heads, self.key_dim, self.value_dim = sizes
        self.dim = max(self.key_dim, self.value_dim)
        self.head_dim = max(1 << (self.dim - 1).bit_length(), 32)
        self.group = self.num_heads // self.kv_heads
        self.sizes = sizes
        self.variant = variant
        self.backend = Backend()
        self.step = Step()

    @cached_property
    def stored_dim(self) -> int:
        """The elements of a head in the cache: as many as the backend has kernels for."""
        known = self.backend.head_dims
        if known is None:
            return self.dim + self.dim % 2
        return min(dim for dim in known if dim >= self.dim)

    @cached_property
    def form(self) -> tuple[int, ...]:
        return self.num_heads, self.kv_heads, self.stored_dim

    def has_plain_heads(self, position_embeddings: Any) -> bool:
        """Return whether a step runs, and this layer rotates all elements of its heads, and stores them unpadded.

        Args:
            position_embeddings: cosines and sines, as transformers gives them to a module. Some modules get None.
        """
        if not self.step.inputs or self.source != self.number or position_embeddings is None:
            return False
        return bool(self.value_dim == self.stored_dim == position_embeddings[0].shape[-1])

    def asks_like(self, other: "AttentionLayer") -> bool:
        """Return whether this layer and another, of another text, ask for the same attention of the same module."""
        window, softcap, sinks = self.variant or AttentionVariant()
        other_window, other_softcap, other_sinks = other.variant or AttentionVariant()
        return (
            self.module is other.module
            and (self.source, self.sizes) == (other.source, other.sizes)
            and (window, softcap, sinks is None) == (other_window, other_softcap, other_sinks is None)
        )

    def make_cache(self, size: CacheSize, dtype: torch.dtype, device: torch.device) -> KVCache:
        """Return the blocks of this layer, empty. A layer that reads another layer's keys and values has none."""
        shape = (size.num_blocks, size.block_size, self.kv_heads, self.stored_dim)
        if self.source != self.number:
            return KVCache(*(torch.empty(0, *shape[1:], dtype=size.kv_dtype, device=device) for _ in range(2)))
        return self.backend.allocate_cache(shape, size.kv_dtype, device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
        """q [num_heads, num_tokens, dim], k and v likewise -> [num_tokens, num_heads, value_dim]."""
        dim = self.stored_dim
        if self.source == self.number:
            qkv = torch.cat((pad(q, dim), pad(k, dim), pad(v, dim))).transpose(0, 1).flatten(1)
            q = self.store(qkv, self.step.norms[dim], self.step.origin)
        else:
            q = pad(q, dim).transpose(0, 1).contiguous()
        return self.read(q, scale, sinks)[..., : self.value_dim]

    def store(self, qkv: Tensor, norms: NormRope, positions: Tensor) -> Tensor:
        """Norm and rotate q and k, store k and v, and return q: see `norm_rope_store_reference`."""
        step = self.step
        cache: Any = step.caches[self.number]
        return self.backend.norm_rope_store(qkv, norms, positions, cache, step.inputs[self.form].slots)

    def read(self, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Attend to the stored keys and values. q [num_tokens, num_heads, stored_dim] -> the same shape."""
        step = self.step
        cache: Any = step.caches[self.source]
        variant = self.variant
        if variant is not None and sinks is not None:
            variant = variant._replace(sinks=sinks.float())
        return self.backend.attend(q, cache, step.inputs[self.form], scale, variant)


def pad(x: Tensor, dim: int) -> Tensor:
    """Return x with zeros after its last dimension's elements, so that there are `dim`."""
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a module's attention over the cached keys and values: transformers calls this.

    query [1, num_heads, num_tokens, dim], key and value likewise -> [1, num_tokens, num_heads, dim].
    """
    layer: AttentionLayer = module.__dict__["nanovllm_layer"]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layer.attend(query[0], key[0], value[0], scale, s_aux)[None], None


def keep(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **named: Any) -> tuple[Tensor, None]:
    """Keep what a module gives to attention, in the module: see `whole.py`. Returns the queries."""
    module.__dict__["kept"] = (query[0], key[0], value[0], named)
    return query.transpose(1, 2).contiguous(), None


# ---- the dry run


@dataclass
class Mask:
    """Stands for a mask of transformers in the dry run.

    Attributes:
        window: a token sees so many tokens, itself included; None: all tokens up to itself.
        refusal: why the mask cannot be had here; "" if it can. Some models make masks that no layer reads.
        num_tokens: the tokens of the text that runs.
    """

    window: int | None
    refusal: str = ""
    num_tokens: int = 2
    ndim = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, 1, self.num_tokens, self.num_tokens

    def __radd__(self, scores: Tensor) -> Tensor:
        raise ValueError("its layers compute attention themselves, and do not call transformers' attention function")

    def __getitem__(self, part: tuple[slice, ...]) -> "Mask":
        """Return the mask, of which a model may take everything."""
        if any(one not in (slice(None), slice(0, None)) for one in part):
            raise ValueError("its layers take parts of a mask")
        return self


_recordings = threading.local()


@contextmanager
def recording(num_tokens: int) -> Iterator[list[AttentionLayer]]:
    """Return a context manager. In its `with` block calls of attention are recorded in a list, in their order.

    Args:
        num_tokens: the tokens of the text that runs there.
    """
    _recordings.calls = []
    _recordings.keys = []
    _recordings.num_tokens = num_tokens
    try:
        yield _recordings.calls
    finally:
        del _recordings.calls, _recordings.keys, _recordings.num_tokens


def record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Note what a module asks for: see `attend`. Returns zeros.

    Raises:
        ValueError: it asks for something that this engine does not have.
    """
    calls: list[AttentionLayer] = _recordings.calls
    keys: list[Tensor] = _recordings.keys
    if strange := {name for name, given in others.items() if given is not None} - HARMLESS:
        raise ValueError(f"its attention takes {', '.join(sorted(strange))}, which this engine does not know")
    if not isinstance(attention_mask, Mask):
        raise ValueError("its attention has a mask that transformers' table of masks does not make")
    if attention_mask.refusal:
        raise ValueError(attention_mask.refusal)
    window = attention_mask.window
    if sliding_window is not None and sliding_window != window:
        raise ValueError(
            f"its masks show the last {window or 'all'} tokens, and its attention asks for {sliding_window}"
        )
    if getattr(module, "is_causal", True) is False or others.get("is_causal") is False:
        raise ValueError("its attention is not causal: tokens see later ones")
    if softcap is not None:
        check_cap(softcap, "the cap of its attention's scores")
    if any(layer.module is module for layer in calls):
        raise ValueError("several of its layers share a module of attention")
    if {query.shape[0], key.shape[0], value.shape[0]} != {1}:
        raise ValueError("its layers cut a text into pieces before they attend")
    if lengths := {query.shape[2], key.shape[2], value.shape[2]} - {_recordings.num_tokens}:
        raise ValueError(
            f"in a text of {_recordings.num_tokens} tokens its attention has {lengths.pop()} queries, keys or values: "
            "this engine caches one key and one value for each token, and computes one query"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {key.shape[1]} KV heads evenly")
    number = len(calls)
    source = next((i for i, other in enumerate(keys) if other is key), number)
    sizes = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    asked = AttentionVariant(window, softcap, s_aux)
    variant = None if asked == AttentionVariant() else asked
    calls.append(AttentionLayer(module, number, source, sizes, variant))
    keys.append(key)
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def describe_mask(*_: Any, mask_function: Any, **__: Any) -> Mask:
    """Ask a mask function of transformers what a token sees. This makes the masks of the dry run."""
    return replace(_describe(mask_function), num_tokens=_recordings.num_tokens)


def _describe(mask_function: Any) -> Mask:
    with torch.device("cpu"):
        first, count = _ask(mask_function, FAR)
        if count != FAR + 1 - first:
            return Mask(None, "its masks are neither causal nor sliding windows")
        if first == 0:  # a window may be longer
            lengths = {_measure(mask_function, position) for position in (FARTHEST, FARTHEST - 12345)}
        else:
            later = FAR + 12345  # a chunk begins elsewhere there; a window is as long
            seen = _ask(mask_function, later)
            lengths = {count} if seen == (later + 1 - count, count) else {count, None}
    if len(lengths) > 1 or 0 in lengths:
        return Mask(None, CHUNKED)
    return Mask(lengths.pop())


def _measure(mask_function: Any, position: int) -> int | None:
    """Return how many keys a token sees that sees all keys that are FAR before it; None if it sees all that there are.

    The farthest key is found by bisection. The result is 0 if the token does not see the key FAR before it.
    """
    near = FAR
    far = position + 1
    if not _sees(mask_function, position, position - near):
        return 0
    while far - near > 1:
        middle = (near + far) // 2
        if _sees(mask_function, position, position - middle):
            near = middle
        else:
            far = middle
    return None if near == position else near + 1


def _sees(mask_function: Any, position: int, key: int) -> bool:
    zero = torch.zeros((), dtype=torch.long)
    return bool(torch.as_tensor(mask_function(zero, zero, torch.tensor(position), torch.tensor([key]))).all())


def _ask(mask_function: Any, position: int) -> tuple[int, int]:
    """Return the first key that a token sees, and how many keys without a gap; (0, 0) if it sees a later key."""
    keys = torch.arange(position + 2)
    zero = torch.zeros((), dtype=torch.long)
    sees = torch.as_tensor(mask_function(zero, zero, torch.tensor(position), keys)).expand(keys.shape)
    first = int(sees.int().argmax())
    if not torch.equal(sees, (keys >= first) & (keys <= position)):
        return 0, 0
    return first, int(sees.sum())


def register() -> None:
    """Put the functions of this file into transformers' tables. Without a mask in the table a model makes no masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(DRY_RUN, record)
    AttentionInterface.register(TRIAL, keep)
    AttentionMaskInterface.register(DRY_RUN, describe_mask)
