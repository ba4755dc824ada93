"""The decoder of Qwen3 (https://arxiv.org/abs/2505.09388), Qwen2, Llama and Mistral.

It computes the same numbers as transformers, up to rounding. The families differ in biases, in norms of queries and
keys, and in sliding windows. `FAMILIES` in models/model_config.py lists the biases and norms of each family, and
`find_window` reads the window of a layer. The decoders of other families are subclasses, which replace parts of this
decoder.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.backends import Backend, CacheSize, KVCache, LayerCache
from nanovllm.models.layers.embedding import LMHead, VocabParallelEmbedding
from nanovllm.models.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.model_config import find_family, find_rotary_dim, find_window
from nanovllm.ops.attention import AttentionVariant
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.ops.step_inputs import StepInputs
from nanovllm.utils.machine import default_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanovllm.config import ResolvedConfig

POSITIONS_AT_A_TIME = 2048
"""`make_rotary_table` computes so many rows at a time. It needs several copies of them, and their memory stays in the
process: of a whole table it would be too much."""


def make_rotary_table(config: "PretrainedConfig", num_positions: int) -> Tensor:
    """Return the cosines and sines of the rotation angles (RoPE: Su et al. 2021, https://arxiv.org/abs/2104.09864).

    For rope types other than "default", transformers computes the frequencies.

    Returns:
        float32 [num_positions, head_dim]: a row has head_dim/2 cosines, then head_dim/2 sines. In most families the
        whole head rotates. What does not rotate has the angle 0.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    # The CPU gives the same bits wherever the model is, and float32 whatever its dtype is.
    with torch.device("cpu"), default_dtype(torch.float32):
        if rope["rope_type"] == "default":
            dim = find_rotary_dim(config)
            exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
            frequencies = 1.0 / rope["rope_theta"] ** exponents
            scaling = 1.0
            if "divisors" in rope:  # a GGUF file has Llama 3's scaling as one number for each frequency
                frequencies /= torch.tensor(rope["divisors"])
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        table = torch.zeros(num_positions, config.head_dim)
        cos, sin = table.chunk(2, dim=1)
        cos.fill_(1)
        num_rotated = len(frequencies)
        for first in range(0, num_positions, POSITIONS_AT_A_TIME):
            rows = slice(first, min(first + POSITIONS_AT_A_TIME, num_positions))
            angles = torch.outer(torch.arange(rows.start, rows.stop, dtype=torch.float32), frequencies.float())
            torch.mul(angles.cos(), scaling, out=cos[rows, :num_rotated])
            torch.mul(angles.sin(), scaling, out=sin[rows, :num_rotated])
        return table


def make_norm(size: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return the weight of an RMSNorm, uninitialised."""
    return nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)


def share_heads(config: "PretrainedConfig", parallel: Parallel) -> tuple[range, range]:
    """Return a rank's query heads, and its key-value heads.

    Raises:
        ValueError: the ranks cannot share the heads evenly.
    """
    total = config.num_key_value_heads
    if parallel.size % total == 0:  # each rank has one KV head, and several ranks may have the same
        first_kv_head = parallel.share * total // parallel.size
        num_kv_heads = 1
    else:
        first_kv_head, num_kv_heads = parallel.shard(total, "num_key_value_heads")
    first_head, num_heads = parallel.shard(config.num_attention_heads, "num_attention_heads")
    return range(first_head, first_head + num_heads), range(first_kv_head, first_kv_head + num_kv_heads)


def find_biases(config: "PretrainedConfig") -> tuple[bool, bool]:
    """Return whether the projection of queries, keys and values has a bias, and whether the output's projection has
    one."""
    own = bool(getattr(config, "attention_bias", False))
    return find_family(config).biases or (own, own)


class Attention(nn.Module):
    """Grouped-query attention. In some families an RMSNorm is applied to each query and key head before the
    rotation.

    Attributes:
        norm_dtype: the dtype of these norms' weights; None for the model's dtype.
        head_dim, group: elements of a head, and query heads per KV head. The backend must have kernels for them.
        variant: how this layer differs from plain causal attention; None if it does not.
    """

    norm_dtype: torch.dtype | None = None

    def __init__(
        self,
        config: "PretrainedConfig",
        backend: Backend,
        parallel: Parallel,
        variant: AttentionVariant | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.variant = variant
        self.head_dim = dim = config.head_dim
        heads, kv_heads = share_heads(config, parallel)
        self.kv_heads = len(kv_heads)
        self.group = len(heads) // len(kv_heads)
        qkv_bias, o_bias = find_biases(config)
        self.make_projections(config, heads, kv_heads, qkv_bias)
        queries = config.num_attention_heads * dim
        self.o_proj = RowParallelLinear(queries, config.hidden_size, o_bias, parallel, "o_proj")
        has_norms = find_family(config).qk_norm
        self.q_norm = make_norm(dim, self.norm_dtype) if has_norms else None
        self.k_norm = make_norm(dim, self.norm_dtype) if has_norms else None

    def make_projections(self, config: "PretrainedConfig", heads: range, kv_heads: range, bias: bool) -> None:
        """Make the matrices of queries, keys and values. The layer's input is multiplied by them.

        Args:
            heads, kv_heads: the numbers of the query heads and KV heads that this rank has.
        """
        dim = self.head_dim
        parts = [
            Part(name, size=total * dim, start=mine.start * dim, length=len(mine) * dim)
            for name, total, mine in (
                ("q_proj", config.num_attention_heads, heads),
                ("k_proj", config.num_key_value_heads, kv_heads),
                ("v_proj", config.num_key_value_heads, kv_heads),
            )
        ]
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, parts, bias)

    def make_cache(self, size: CacheSize, dtype: torch.dtype, device: torch.device) -> KVCache:
        """Return the blocks of this layer, empty."""
        shape = (size.num_blocks, size.block_size, self.kv_heads, self.head_dim)
        return self.backend.allocate_cache(shape, size.kv_dtype, device)

    def forward(self, x: Tensor, cos_sin: Tensor, cache: KVCache, inputs: StepInputs) -> Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden]; the tokens' keys and values are stored in the cache first.

        `norm_rope_store` does this: it norms and rotates queries and keys, stores keys and values, and returns queries.
        """
        norms = NormRope(self.q_norm, self.k_norm, self.eps, cos_sin)
        q = self.backend.norm_rope_store(self.qkv_proj(x), norms, inputs.positions, cache, inputs.slots)
        attended = self.backend.attend(q, cache, inputs, self.scale, self.variant)
        return self.o_proj(attended.flatten(1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    size_name = "intermediate_size"
    """The configuration's key for the intermediate size."""

    def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> None:
        super().__init__()
        self.backend = backend
        size: int = getattr(config, self.size_name)
        start, length = parallel.shard(size, self.size_name)
        parts = [Part(name, size, start, length) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, parts, bias=False)
        self.down_proj = RowParallelLinear(size, config.hidden_size, False, parallel, "down_proj")

    def forward(self, x: Tensor, inputs: StepInputs) -> Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden].

        Args:
            inputs: the inputs of the step. An MLP does not read them. Another family may have a module here that reads
                them.
        """
        return self.down_proj(self.backend.silu_and_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]

    def count_activations(self) -> int:
        """Return how many numbers the MLP holds for each token: gate, up and their product."""
        return 3 * self.down_proj.weight.shape[1]


class Layer(nn.Module):
    """Attention and MLP. A norm comes before each of them.

    A layer returns x and the residual as two tensors, not as their sum. The next norm adds the two and normalises the
    sum, in one fused operator. A layer that has added them already returns the sum and None.

    Attributes:
        norm_dtype: the dtype of its norms' weights; None for the model's dtype.
        norm_plus: the number that is added to the weights of norms when they are read. A family that adds 1 also sets
            `norm_dtype` to float32, because the sum would lose bits in the model's dtype.
    """

    norm_dtype: torch.dtype | None = None
    norm_plus = 0.0
    self_attn: nn.Module

    def __init__(self, config: "PretrainedConfig", index: int, backend: Backend, parallel: Parallel) -> None:
        super().__init__()
        self.backend = backend
        self.eps = config.rms_norm_eps
        self.self_attn = self.make_attention(config, index, parallel)
        self.mlp = self.make_mlp(config, index, parallel)
        self.input_layernorm = make_norm(config.hidden_size, self.norm_dtype)
        self.post_attention_layernorm = make_norm(config.hidden_size, self.norm_dtype)

    def make_attention(self, config: "PretrainedConfig", index: int, parallel: Parallel) -> nn.Module:
        """Return this layer's attention. Another family may return another module with the methods of `Attention`."""
        window = find_window(config, index)
        return Attention(config, self.backend, parallel, None if window is None else AttentionVariant(window))

    def make_mlp(self, config: "PretrainedConfig", index: int, parallel: Parallel) -> nn.Module:
        """Return this layer's MLP. Another family may return another module with the `forward` of `MLP`."""
        return MLP(config, self.backend, parallel)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos_sin: Tensor, cache: LayerCache, inputs: StepInputs
    ) -> tuple[Tensor, Tensor | None]:
        if residual is None:
            residual = x
            x = self.backend.rms_norm(x, self.input_layernorm, self.eps)
        else:
            x, residual = self.backend.add_rms_norm(x, residual, self.input_layernorm, self.eps)
        x = self.self_attn(x, cos_sin, cache, inputs)
        x, residual = self.backend.add_rms_norm(x, residual, self.post_attention_layernorm, self.eps)
        return self.mlp(x, inputs), residual


class Decoder(nn.Module):
    """The model of one rank. Its parameters are uninitialised; the loader fills them, and checks that none is left out.

    `models/model_config.py` and `models/weight_names.py` have what else differs between families: which values of a
    configuration are refused, what options become, and how a checkpoint names the tensors.

    Attributes:
        layer_class: the class of its layers. A family of models whose layers differ in more than biases and norms has a
            class of its own.
    """

    layer_class: type[Layer] = Layer
    cos_sin: Tensor

    def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> None:
        super().__init__()
        self.backend = backend
        self.eps = config.rms_norm_eps
        self.tied = bool(config.tie_word_embeddings)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(
            self.layer_class(config, i, backend, parallel) for i in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config.hidden_size, self.layer_class.norm_dtype)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, parallel)
        if self.tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("cos_sin", torch.empty(0), persistent=False)  # until `fill_tables`

    def fill_tables(self, config: "PretrainedConfig", num_positions: int, device: torch.device) -> None:
        """Compute the tables that no checkpoint has, once the model's parameters have memory."""
        self.register_buffer("cos_sin", make_rotary_table(config, num_positions).to(device), persistent=False)

    def prove(self, config: "ResolvedConfig") -> None:
        """Compare the loaded model with another implementation, if the family needs that; ValueError if they differ."""

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> Tensor:
        """Compute the hidden states of all tokens, [num_tokens, hidden], after the last norm."""
        x = self.embed_tokens(inputs.token_ids)
        residual = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, self.cos_sin, cache, inputs)
        assert residual is not None
        return self.backend.add_rms_norm(x, residual, self.norm, self.eps)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """hidden [n, hidden] -> logits [n, vocab] on rank 0, None on the other ranks."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]


def find_decoder(config: "PretrainedConfig") -> type[Decoder]:
    """Return the class of the decoder of a configuration's family. Only then is the family's folder imported."""
    decoder: type[Decoder] = resolve_name(find_family(config).decoder)
    return decoder
