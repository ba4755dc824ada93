"""Our C++ kernels for the CPU, compiled on first use; and the packed weights and the memory that they work on."""

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.backends.base import Backend
from nanovllm.backends.cpu.huge_pages import advise_huge_pages, return_freed_memory
from nanovllm.backends.cpu.library import LANES, MAX_HEAD_DIM, PANEL, CpuLibrary, cpu_library
from nanovllm.backends.cpu.recorded_steps import RecordedSteps
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.backends.steps import Steps
from nanovllm.backends.torch_backend import pack_matrices
from nanovllm.models.layers.embedding import LMHead, VocabParallelEmbedding
from nanovllm.models.layers.weights import ShardedLayer
from nanovllm.ops.attention import AttentionVariant, KVCache
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.ops.sample import Sampled, SamplingValues
from nanovllm.ops.step_inputs import StepInputs, empty_step_inputs
from nanovllm.ops.token_logprobs import TokenLogprobs
from nanovllm.utils.machine import torch_in_one_thread

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner


def find_sampling_values() -> tuple[str, ...]:
    """Return the fields of `SamplingValues` that the kernel reads: `request.top_k` in sample.h reads top_k."""
    read = re.findall(r"\brequest\.(\w+)", Path(__file__).with_name("sample.h").read_text())
    values = {"seeds" if name.startswith("seed_") else name for name in read}
    return tuple(name for name in SamplingValues._fields if name in values)


class CpuBackend(Backend):
    """Calls the kernels of backends/cpu/. A width that a kernel does not know goes to its reference, call by call.

    The cache has the usual shape and strides, but the kernels order the elements of a (block, head) tile themselves.
    """

    name = "cpu"
    kernels = "cpu"
    dtypes = (torch.bfloat16, torch.float32)
    head_dims = tuple(range(2 * LANES, MAX_HEAD_DIM + 1, 2 * LANES))
    groups = range(1, 48 + 1)
    sampling_values = find_sampling_values()

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.library = cpu_library()
        self.scratch = Scratch()
        """Lends memory to the results of all operators."""

    @classmethod
    def why_cannot(cls, device: torch.device) -> str | None:
        """Compile the kernels, unless they lie in the user's cache folder; return why that fails, if it does."""
        try:
            cpu_library()
        except RuntimeError as error:
            return str(error)
        return None

    def with_threads(self) -> AbstractContextManager[object]:
        return torch_in_one_thread()  # the kernels have a team of their own

    def make_steps(self, runner: "ModelRunner") -> Steps:
        config = runner.config
        if config.num_ranks > 1 or config.enforce_eager:
            return super().make_steps(runner)
        return RecordedSteps(runner)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.library.zeros(shape, dtype)

    def prepare_weights(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            advise_huge_pages(weight)

    def pack_weights(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        pack_matrices(modules, lambda weight: NativeMatrix(self.library, weight, self.scratch, in_place=True))
        for module in modules:
            is_embedding = isinstance(module, VocabParallelEmbedding) and not isinstance(module, LMHead)
            if is_embedding and module.packed is None:
                module.packed = PlainRows(self.library, module.weight.data, self.scratch)
            if isinstance(module, ShardedLayer):
                for weight in filter(packs_in_place, module.list_matrices()):
                    for matrix in weight:
                        self.library.pack(matrix, in_place=True)
        return_freed_memory()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.shape[1] % LANES:
            return super().rms_norm(x, weight, eps)
        y = self.scratch.empty(*x.shape, dtype=x.dtype)
        self.library.call("add_rms_norm", x.dtype, x, None, weight, y, None, *x.shape, _is_wide(weight), eps)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.shape[1] % LANES:
            return super().add_rms_norm(x, residual, weight, eps)
        y, total = (self.scratch.empty(*x.shape, dtype=x.dtype) for _ in range(2))
        self.library.call("add_rms_norm", x.dtype, x, residual, weight, y, total, *x.shape, _is_wide(weight), eps)
        return y, total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows = gate_up.shape[0]
        size = gate_up.shape[1] // 2
        if size % LANES:
            return super().silu_and_mul(gate_up)
        y = self.scratch.empty(rows, size, dtype=gate_up.dtype)
        self.library.call("silu_and_mul", y.dtype, gate_up, y, rows, size)
        return y

    def norm_rope_store(self, qkv: Tensor, norms: NormRope, positions: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
        block_size, num_kv_heads, dim = cache.keys.shape[1:]
        tokens = qkv.shape[0]
        num_heads = qkv.shape[1] // dim - 2 * num_kv_heads
        q = self.scratch.empty(tokens, num_heads, dim, dtype=qkv.dtype)
        inputs = (qkv, norms.q_weight, norms.k_weight, norms.cos_sin, positions.to(torch.int32), slots)
        is_wide = norms.q_weight is not None and _is_wide(norms.q_weight)
        sizes = (tokens, num_heads, num_kv_heads, dim, block_size, is_wide, norms.eps)
        self.library.call("norm_rope_store", q.dtype, *inputs, q, *cache, *sizes)
        return q

    def attend(
        self,
        q: Tensor,
        cache: KVCache,
        inputs: StepInputs,
        scale: float,
        variant: AttentionVariant | None = None,
    ) -> Tensor:
        block_size, num_kv_heads, dim = cache.keys.shape[1:]
        q = q.contiguous()
        tables = inputs.block_tables.contiguous()
        out = self.scratch.empty(*q.shape, dtype=q.dtype)
        sizes = (*tables.shape, num_kv_heads, q.shape[1] // num_kv_heads, dim, block_size, scale)
        steps = (tables, inputs.cu_seqlens, inputs.seq_lens)
        self.library.call("attend", q.dtype, q, *cache, *steps, out, *sizes, *_to_arguments(variant))
        return out

    def step_inputs(
        self,
        rows: Tensor,
        num_computed: Tensor,
        num_scheduled: Tensor,
        token_ids: Tensor,
        block_tables: Tensor,
        last_token: Tensor,
        block_size: int,
    ) -> StepInputs:
        made = empty_step_inputs(rows, len(token_ids), block_tables.shape[1], self.scratch.empty)
        sizes = (len(rows), len(last_token) - 1, block_tables.shape[1], block_size)
        given = (rows, num_computed, num_scheduled, token_ids, block_tables, last_token)
        results = (made.token_ids, made.positions, made.slots, made.cu_seqlens, made.seq_lens, made.block_tables)
        self.library.call("step_inputs", None, *given, *results, *sizes)
        return made

    def sample(self, logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Sampled:
        logits = logits.contiguous()
        sampled = Sampled(*(self.scratch.empty(len(logits), dtype=torch.int32) for _ in Sampled._fields))
        self.library.call("sample", logits.dtype, logits, table, rows, positions, *sampled, *logits.shape)
        return sampled

    def store_samples(self, token_ids: Tensor, rows: Tensor, last_token: Tensor) -> None:
        self.library.call("store_samples", None, token_ids, rows, last_token, len(rows))

    def token_logprobs(self, logits: Tensor, token_ids: Tensor) -> TokenLogprobs:
        n = len(logits)
        found = TokenLogprobs(*(torch.empty(n, dtype=t) for t in (torch.float32, torch.float32, torch.int32)))
        inputs = (logits.contiguous(), token_ids.to(torch.int32).contiguous())
        self.library.call("token_logprobs", logits.dtype, *inputs, *found, *logits.shape)
        return found

    def top_logits(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, ids = (torch.empty(len(logits), k, dtype=t) for t in (torch.float32, torch.int32))
        self.library.call("top_logits", logits.dtype, logits.contiguous(), values, ids, *logits.shape, k)
        return values, ids


def _to_arguments(variant: AttentionVariant | None) -> tuple[int, float, Tensor | None]:
    """Return a variant as the kernel takes it. Zeros and None stand for plain attention."""
    if variant is None:
        return 0, 0.0, None
    sinks = None if variant.sinks is None else variant.sinks.float().contiguous()
    return variant.window or 0, variant.softcap or 0.0, sinks


def _is_wide(weight: Tensor) -> bool:
    """Return whether a norm's weight is float32. Beside a bfloat16 x it then scales before the rounding."""
    return weight.dtype == torch.float32


def packs_in_place(weight: Tensor) -> bool:
    """Return whether these are matrices of experts, [num_experts, out, in], that packing does not enlarge."""
    return weight.dim() == 3 and weight.shape[1] % PANEL == 0 and weight.shape[2] % 2 == 0


def gather_rows(library: CpuLibrary, x: Tensor, indices: Tensor, scratch: Scratch) -> Tensor:
    """Return the rows of x [n, size] at indices int32 [m], in memory that `scratch` lends: [m, size]."""
    x = x.contiguous()
    rows = scratch.empty(len(indices), x.shape[1], dtype=x.dtype)
    library.call("gather_rows", None, x, indices, rows, len(indices), x.shape[1] * x.element_size())
    return rows


class NativeMatrix:
    """A matrix [out, in], packed for the `linear` kernel. It gives single rows, too: a tied embedding needs no copy."""

    def __init__(self, library: CpuLibrary, weight: Tensor, scratch: Scratch, in_place: bool = False) -> None:
        self._library = library
        self._scratch = scratch
        self._out, self._in = weight.shape
        self._packed = library.pack(weight.contiguous(), in_place)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self._scratch.empty(x.shape[0], self._out, dtype=x.dtype)
        self._library.call("linear", x.dtype, x.contiguous(), self._packed, bias, y, x.shape[0], self._in, self._out)
        return y

    def rows(self, indices: Tensor) -> Tensor:
        rows = self._scratch.empty(len(indices), self._in, dtype=self._packed.dtype)
        units = self._in * rows.element_size() // 4
        self._library.call("packed_rows", None, self._packed, indices.to(torch.int32), rows, len(indices), units)
        return rows


class PlainRows:
    """The matrix [out, in] of an embedding that shares no packed one with the LM head. Its rows are only looked up."""

    def __init__(self, library: CpuLibrary, weight: Tensor, scratch: Scratch) -> None:
        self._library = library
        self._weight = weight
        self._scratch = scratch

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight, bias)

    def rows(self, indices: Tensor) -> Tensor:
        return gather_rows(self._library, self._weight, indices.to(torch.int32), self._scratch)
