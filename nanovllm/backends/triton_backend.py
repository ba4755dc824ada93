"""Our own Triton kernels: needs nothing but torch, triton and a CUDA device (or Triton's interpreter, for tests)."""

from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.backends.base import Backend
from nanovllm.kernels.attention import AttentionMetadata, KVCache
from nanovllm.kernels.combine import combine
from nanovllm.kernels.edit_logits import MaskAndPenalties, edit_logits
from nanovllm.kernels.grouped_linear import grouped_linear
from nanovllm.kernels.norm_rope_store import NormRope, norm_rope_store
from nanovllm.kernels.paged_decode import decode_metadata, paged_decode
from nanovllm.kernels.paged_prefill import paged_prefill
from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.kernels.route import Routing, route
from nanovllm.kernels.sample import Sampled, SamplingValues, sample
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.kernels.step_inputs import PlannedRows, RowTables, StepInputs, step_inputs
from nanovllm.kernels.triton_shim import HAS_TRITON, INTERPRETED


class TritonBackend(Backend):
    name = "triton"
    head_dims = (32, 64, 128)
    groups = (1, 2, 3, 4, 5, 6, 7, 8, 16)
    block_sizes = (16, 32, 64, 128, 256)

    @classmethod
    def why_cannot(cls, device: torch.device) -> str | None:
        if device.type != "cuda" and not INTERPRETED:
            return f"it needs a CUDA device, not {device.type} (or, for tests, TRITON_INTERPRET=1 set before the start)"
        if not HAS_TRITON:
            return "triton is not installed (pip install triton)"
        return None

    def step_inputs(self, planned: PlannedRows, tables: RowTables, block_size: int) -> StepInputs:
        return step_inputs(planned, tables, block_size)

    def complete(self, metadata: AttentionMetadata, cache: KVCache, num_heads: int) -> AttentionMetadata:
        decodes = metadata.num_decodes
        if not decodes:
            return metadata
        of_decodes = metadata.seq_lens[:decodes], metadata.block_tables[:decodes]
        return replace(metadata, decodes=decode_metadata(*of_decodes, cache, num_heads))

    def attend(self, q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = metadata.num_decodes
        seq_lens, block_tables = metadata.seq_lens, metadata.block_tables
        if decodes:
            assert metadata.decodes is not None, "the metadata is not complete"
            paged_decode(q[:decodes], cache, block_tables[:decodes], metadata.decodes, scale, out[:decodes])
        if seq_lens.shape[0] > decodes:
            prefills = (metadata.cu_seqlens_q[decodes:], seq_lens[decodes:], block_tables[decodes:])
            paged_prefill(q, cache, *prefills, num_tokens=q.shape[0] - decodes, scale=scale, out=out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)

    def route(self, logits: Tensor, k: int, normalize: bool, slots: Tensor) -> Routing:
        return route(logits, k, normalize, slots)

    def grouped_linear(self, x: Tensor, weight: Tensor, routing: Routing, gather: bool) -> Tensor:
        return grouped_linear(x, weight, routing, gather)

    def combine(self, y: Tensor, routing: Routing) -> Tensor:
        return combine(y, routing)

    def norm_rope_store(self, qkv: Tensor, norms: NormRope, positions: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
        return norm_rope_store(qkv, norms, positions, cache, slots)

    def sample(self, logits: Tensor, values: SamplingValues) -> Sampled:
        return sample(logits, values)

    def edit_logits(self, logits: Tensor, edits: MaskAndPenalties) -> None:
        edit_logits(logits, edits)
