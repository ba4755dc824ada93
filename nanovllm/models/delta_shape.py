"""The sizes of Gated DeltaNet layers, which memory is planned with. delta_net.py computes them."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.layers.parallel import Parallel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
