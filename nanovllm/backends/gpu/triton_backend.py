"""Our own Triton kernels. They need torch, triton and a CUDA device (or, for tests, Triton's interpreter)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from nanovllm.backends.base import Backend
from nanovllm.backends.gpu.device import CudaBackend
from nanovllm.backends.gpu.gate_and_mul import silu_and_mul
from nanovllm.backends.gpu.norm_rope_store import norm_rope_store
from nanovllm.backends.gpu.paged_decode import decode_metadata, paged_decode
from nanovllm.backends.gpu.paged_prefill import paged_prefill
from nanovllm.backends.gpu.rms_norm import add_rms_norm, rms_norm
from nanovllm.backends.gpu.sample import sample
from nanovllm.backends.gpu.sample_filter import SAMPLING_VALUES
from nanovllm.backends.gpu.step_inputs import step_inputs
from nanovllm.backends.gpu.token_logprobs import token_logprobs
from nanovllm.backends.gpu.triton_shim import INTERPRETED
from nanovllm.ops.attention import AttentionVariant, KVCache
from nanovllm.ops.step_inputs import StepInputs


class TritonKernels(Backend):
    """Computes the operators by Triton kernels. By itself it runs in Triton's interpreter, on a CPU, for tests.

    Attributes:
        rounds_inputs: whether norms and SiLU also round what they write, for the products that follow. Whoever lays
            matrices that need it sets it.
        few_rows_bytes: layers whose matrices have at most so many bytes multiply few rows by the kernel of few_rows.py.
            None stands for those of `choose_few_rows_bytes`. Benchmarks and tests set another number.
    """

    name = "triton"
    kernels = "gpu"
    captures_steps = True
    head_dims = (32, 64, 128, 256)
    groups = (1, 2, 3, 4, 5, 6, 7, 8, 16)
    block_sizes = (16, 32, 64, 128, 256)
    sampling_values = SAMPLING_VALUES

    rounds_inputs = False
    few_rows_bytes: ClassVar[int | None] = None

    step_inputs = staticmethod(step_inputs)
    norm_rope_store = staticmethod(norm_rope_store)
    sample = staticmethod(sample)
    token_logprobs = staticmethod(token_logprobs)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, self.rounds_inputs)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps, self.rounds_inputs)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up, self.rounds_inputs)

    def pack_weights(self, modules: Iterable[nn.Module]) -> None:
        from nanovllm.backends.gpu.few_rows_layer import choose_few_rows_bytes, use_few_rows

        modules = list(modules)
        super().pack_weights(modules)
        most_bytes = self.few_rows_bytes
        use_few_rows(modules, choose_few_rows_bytes(self.device) if most_bytes is None else most_bytes)

    @classmethod
    def why_cannot(cls, device: torch.device) -> str | None:
        if device.type != "cuda" and not INTERPRETED:
            return f"it needs a CUDA device, not {device.type} (or, for tests, TRITON_INTERPRET=1 set before the start)"
        return None

    @classmethod
    def list_kv_cache_dtypes(cls, device: torch.device) -> tuple[str, ...]:
        has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        return ("auto", "int8", "fp8") if has_fp8 else ("auto", "int8")

    def prepare_attention(self, inputs: StepInputs, cache: KVCache, num_heads: int) -> StepInputs:
        decodes = inputs.num_decodes
        if not decodes:
            return inputs
        return replace(inputs, prepared=decode_metadata(inputs.seq_lens[:decodes], cache, num_heads))

    def attend(
        self, q: Tensor, cache: KVCache, inputs: StepInputs, scale: float, variant: AttentionVariant | None = None
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = inputs.num_decodes
        seq_lens = inputs.seq_lens
        block_tables = inputs.block_tables
        if decodes:
            assert inputs.prepared is not None, "prepare_attention was not called"
            tables = block_tables[:decodes]
            paged_decode(q[:decodes], cache, tables, inputs.prepared, scale, out[:decodes], variant)
        if seq_lens.shape[0] > decodes:
            prefills = (inputs.cu_seqlens[decodes:], seq_lens[decodes:], block_tables[decodes:])
            paged_prefill(q, cache, *prefills, num_tokens=q.shape[0] - decodes, scale=scale, out=out, variant=variant)
        return out


class TritonBackend(CudaBackend, TritonKernels):
    """Our Triton kernels on a GPU."""
