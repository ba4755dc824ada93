"""Checks the configuration of a hybrid, and derives its sizes: some of its layers are Gated DeltaNets (delta_net.py).

qwen3_5.py has the decoder, states.py the options that a state per row changes.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from nanovllm.layers.parallel import Parallel
from nanovllm.models.config import Shape, find_family, find_rotary_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LINEAR_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)


def check_hybrid(config: "PretrainedConfig", source: str) -> None:
    """Check what `load_model_config` leaves to the family: load.py calls this after it.

    Raises:
        ValueError: a value is out of range, or two contradict each other. The message begins with `source`.
    """
    for name in LINEAR_SIZES:
        if getattr(config, name) < 1:
            raise ValueError(f"{source}: {name} is {getattr(config, name)}; it must be at least 1")
    num_kinds = len(config.layer_types)
    if num_kinds != config.num_hidden_layers:
        raise ValueError(
            f"{source}: layer_types names {num_kinds} layers, and num_hidden_layers is {config.num_hidden_layers}"
        )
    dim = find_rotary_dim(config)
    if dim % 2 or not 2 <= dim <= config.head_dim:
        raise ValueError(
            f"{source}: partial_rotary_factor rotates {dim} elements of a head of {config.head_dim}; it must be an "
            "even number"
        )
    value_heads = config.linear_num_value_heads
    key_heads = config.linear_num_key_heads
    if value_heads % key_heads:
        raise ValueError(f"{source}: {value_heads} value heads cannot share {key_heads} key heads evenly")


@dataclass(frozen=True)
class DeltaShape:
    """The sizes of the DeltaNet layers of a model, or of one rank's share of them, and what follows from them.

    Each key head serves value_heads / key_heads value heads.
    """

    layers: int
    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @staticmethod
    def from_config(config: "PretrainedConfig", layers: int) -> "DeltaShape":
        return DeltaShape(
            layers=layers,
            hidden=config.hidden_size,
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
        )

    def shard(self, size: int) -> "DeltaShape":
        """Return each rank's share; ValueError if so many ranks cannot share the heads evenly."""
        first = Parallel(0, size)
        key_heads = first.shard(self.key_heads, "linear_num_key_heads")[1]
        value_heads = first.shard(self.value_heads, "linear_num_value_heads")[1]
        return replace(self, key_heads=key_heads, value_heads=value_heads)

    @property
    def keys(self) -> int:
        """The elements of a token's keys, which are those of its queries, too."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The convolution reads this of a token: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """(layers, in features, out features) of the matrices of every token."""
        inner = self.channels + self.values + 2 * self.value_heads
        return ((self.layers, self.hidden, inner), (self.layers, self.values, self.hidden))

    @property
    def num_vectors(self) -> int:
        """How many parameters are in no matrix."""
        return self.layers * (self.channels * self.conv_width + 2 * self.value_heads + self.value_dim)

    def row_bytes(self, itemsize: int) -> int:
        """Return the bytes of a row's state, in all layers. `itemsize` is that of the model's dtype."""
        conv = (self.conv_width - 1) * self.channels * itemsize
        return self.layers * (conv + self.value_heads * self.key_dim * self.value_dim * 4)


@dataclass(frozen=True)
class HybridShape(Shape):
    """The sizes of a hybrid. Its attention has a gate, as wide as the queries.

    Attributes:
        delta: the layers that have a Gated DeltaNet in place of attention.
    """

    delta: DeltaShape = field(kw_only=True)

    @classmethod
    def from_config(cls, config: "PretrainedConfig", stage: Any = None, **more: Any) -> Self:
        kinds = config.layer_types if stage is None else config.layer_types[stage.first : stage.end]
        delta = DeltaShape.from_config(config, kinds.count("linear_attention"))
        return super().from_config(config, stage, delta=delta)

    def shard(self, size: int) -> Self:
        return replace(super().shard(size), delta=self.delta.shard(size))

    @property
    def attention_layers(self) -> int:
        return self.layers - self.delta.layers

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Those that every family has, and then those of the DeltaNets."""
        (layers, hidden, qkv), *others = super().matrices
        gates = self.heads * self.head_dim
        return ((layers, hidden, qkv + gates), *others, *self.delta.matrices)

    @property
    def num_parameters(self) -> int:
        return super().num_parameters + self.delta.num_vectors

    def row_bytes(self, itemsize: int) -> int:
        return self.delta.row_bytes(itemsize)


def make_shape(config: "PretrainedConfig", stage: Any = None) -> Shape:
    """Return the shape of a model of any family, or of one stage of a pipeline. An engine's decoder knows it, too."""
    kind = HybridShape if find_family(config).is_hybrid else Shape
    return kind.from_config(config, stage)
