"""Dense decoders, as transformers computes them: Qwen3 (https://arxiv.org/abs/2505.09388), Qwen2, Llama and Mistral.
The layers of Qwen3-MoE whose MLP is dense are these too; the others take theirs from experts.py.

They differ in biases and in the norms of queries and keys: `FAMILIES` in config.py says who has which.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.backends import AttentionMetadata, Backend, KVCache
from nanovllm.kernels.norm_rope_store import NormRope
from nanovllm.layers.embedding import LMHead, VocabParallelEmbedding
from nanovllm.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from nanovllm.layers.parallel import Parallel
from nanovllm.layers.rotary_embedding import rotary_table
from nanovllm.layers.weights import NamedTargets, ShardedLayer, whole
from nanovllm.models.config import sparse_layers
from nanovllm.models.experts import SparseMLP
from nanovllm.models.shape import Shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Attention(nn.Module):
    """Grouped-query attention, in some families with RMSNorm over each query and key head before the rotation."""

    def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> None:
        super().__init__()
        self.backend, self.eps, self.scale = backend, config.rms_norm_eps, config.head_dim**-0.5
        whole_model = Shape.of(config)
        mine, dim = whole_model.of_rank(parallel.size), whole_model.head_dim
        parts = []
        for name, total, count in (
            ("q_proj", whole_model.heads, mine.heads),
            ("k_proj", whole_model.kv_heads, mine.kv_heads),
            ("v_proj", whole_model.kv_heads, mine.kv_heads),
        ):
            first = parallel.rank * total // parallel.size  # of several ranks with the same KV head: that one
            parts.append(Part(name, total * dim, first * dim, count * dim))
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, parts, whole_model.qkv_bias)
        self.o_proj = RowParallelLinear(
            whole_model.heads * dim, config.hidden_size, whole_model.o_bias, parallel, "o_proj"
        )
        norms = [nn.Parameter(torch.empty(dim), requires_grad=False) if whole_model.qk_norm else None for _ in "qk"]
        self.q_norm, self.k_norm = norms

    def forward(self, x: Tensor, cos_sin: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        qkv = self.qkv_proj(x)
        norms = NormRope(self.q_norm, self.k_norm, self.eps, cos_sin)
        q = self.backend.norm_rope_store(qkv, norms, positions, cache, meta.slot_mapping)
        out = self.backend.attend(q, cache, meta, self.scale)
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> None:
        super().__init__()
        self.backend = backend
        size = config.intermediate_size
        start, length = parallel.shard(size, "intermediate_size")
        parts = [Part(name, size, start, length) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, parts, bias=False)
        self.down_proj = RowParallelLinear(size, config.hidden_size, False, parallel, "down_proj")

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        return self.down_proj(self.backend.silu_and_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and MLP, each behind a norm; the residual travels beside x, so that each add meets its norm."""

    def __init__(self, config: "PretrainedConfig", index: int, backend: Backend, parallel: Parallel) -> None:
        super().__init__()
        self.backend, self.eps = backend, config.rms_norm_eps
        self.self_attn = Attention(config, backend, parallel)
        self.mlp = (SparseMLP if index in sparse_layers(config) else MLP)(config, backend, parallel)
        self.input_layernorm = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.post_attention_layernorm = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor,
        positions: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.backend.rms_norm(x, self.input_layernorm, self.eps), x
        else:
            x, residual = self.backend.add_rms_norm(x, residual, self.input_layernorm, self.eps)
        x = self.self_attn(x, cos_sin, positions, cache, meta)
        x, residual = self.backend.add_rms_norm(x, residual, self.post_attention_layernorm, self.eps)
        return self.mlp(x, meta.slot_mapping), residual


class Decoder(nn.Module):
    """The model of one rank. Parameters are made empty: the loader fills them and proves that it did."""

    cos_sin: Tensor

    def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel, max_model_len: int) -> None:
        super().__init__()
        self.backend, self.eps, self.tied = backend, config.rms_norm_eps, bool(config.tie_word_embeddings)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(Layer(config, i, backend, parallel) for i in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, parallel)
        if self.tied:
            self.lm_head.weight = self.embed_tokens.weight
        cos_sin = rotary_table(config, max_model_len).to(self.norm.device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, token_ids: Tensor, positions: Tensor, caches: list[KVCache], meta: AttentionMetadata) -> Tensor:
        """token_ids, positions [num_tokens] -> hidden states [num_tokens, hidden], normed."""
        x, residual = self.embed_tokens(token_ids), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, self.cos_sin, positions, cache, meta)
        assert residual is not None
        return self.backend.add_rms_norm(x, residual, self.norm, self.eps)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """hidden [n, hidden] -> logits [n, vocab] on rank 0, None on the others."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    def weight_targets(self, names: Collection[str] = ()) -> NamedTargets:
        """Yield (checkpoint name, target) of everything that the model needs. Modules are named as in checkpoints.

        Args:
            names: of the checkpoint's tensors, where it may have one of several forms.
        """
        for path, module in self.named_modules(prefix="model"):
            if module is self.lm_head:
                yield from () if self.tied else self.lm_head.weight_targets("lm_head", names)
            elif isinstance(module, ShardedLayer):
                yield from module.weight_targets(path, names)
            else:
                for name, parameter in module.named_parameters(recurse=False):
                    yield f"{path}.{name}.weight", whole(parameter)
