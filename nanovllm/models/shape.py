"""The sizes of a decoder, and what follows from them: parameters, KV bytes, each rank's share."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.layers.parallel import Parallel
from nanovllm.models.config import FAMILIES, sparse_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Shape:
    """Of the whole model, or of one rank's share of it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    sparse_layers: int = 0
    """Layers whose MLP is a mixture of `experts`, each token's `experts_per_token` of them."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0

    @staticmethod
    def of(config: "PretrainedConfig") -> "Shape":
        """Of the whole model."""
        family = next(family for family in FAMILIES.values() if family.config_class == type(config).__name__)
        bias = bool(getattr(config, "attention_bias", False))
        return Shape(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=bias if family.o_bias is None else family.o_bias,
            qk_norm=family.qk_norm,
            sparse_layers=(num_sparse := len(sparse_layers(config))),
            experts=config.num_experts if num_sparse else 0,
            experts_per_token=config.num_experts_per_tok if num_sparse else 0,
            expert_intermediate=config.moe_intermediate_size if num_sparse else 0,
        )

    def of_rank(self, size: int) -> "Shape":
        """What each of `size` ranks holds; a KV head may be held by several alike, and the vocabulary is padded.

        Raises:
            ValueError: so many cannot share the model.
        """
        first = Parallel(0, size)
        kv_heads = 1 if size % self.kv_heads == 0 else first.shard(self.kv_heads, "num_key_value_heads")[1]
        return replace(
            self,
            heads=first.shard(self.heads, "num_attention_heads")[1],
            kv_heads=kv_heads,
            intermediate=first.shard(self.intermediate, "intermediate_size")[1],
            vocab=-(-self.vocab // size),
            expert_intermediate=first.shard(self.expert_intermediate, "moe_intermediate_size")[1],
        )

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """(layers, in, out features) of what multiplies every token: qkv, o, gate and up, down, router."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        dense = self.layers - self.sparse_layers
        return (
            (self.layers, self.hidden, queries + 2 * keys),
            (self.layers, queries, self.hidden),
            (dense, self.hidden, 2 * self.intermediate),
            (dense, self.intermediate, self.hidden),
            (self.sparse_layers, self.hidden, self.experts),
        )

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def num_parameters(self) -> int:
        matrices = sum(count * rows_in * rows_out for count, rows_in, rows_out in self.matrices)
        experts = self.sparse_layers * self.experts * self.expert_parameters
        qkv, o = self.matrices[0][2] * self.qkv_bias, self.hidden * self.o_bias
        vectors = self.layers * (2 * self.hidden + 2 * self.head_dim * self.qk_norm + qkv + o) + self.hidden
        return matrices + experts + self.vocab * self.hidden * (1 if self.tied else 2) + vectors

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of a token's keys and values, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize
