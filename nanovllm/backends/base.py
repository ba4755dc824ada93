"""The device seam: one object has all that differs from device to device.

It computes the operators of a model, runs and replays steps, moves data, and knows the memory. runner/resolve.py
chooses a backend at start-up. The runner and every layer call that object, so they do not need to know where they run.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nanovllm.backends.staging import Staging
from nanovllm.backends.steps import EAGER, Steps, Stopwatch
from nanovllm.ops.attention import AttentionVariant, KVCache, attend_reference
from nanovllm.ops.norm_rope_store import norm_rope_store_reference
from nanovllm.ops.rms_norm import add_rms_norm_reference, rms_norm_reference
from nanovllm.ops.sample import SamplingValues, sample_reference, store_samples_reference
from nanovllm.ops.silu_and_mul import silu_and_mul_reference
from nanovllm.ops.step_inputs import StepInputs, step_inputs_reference
from nanovllm.ops.token_logprobs import token_logprobs_reference, top_logits_reference
from nanovllm.utils.memory import cpu_cache_budget, free_memory

T = TypeVar("T")


class Backend:
    """Runs models in plain torch, on any torch.device. A subclass replaces what its device does faster.

    Each operator is a class attribute that holds the reference function. There is no wrapper method, which would repeat
    the arguments. A subclass whose operator needs an object of its own, such as the loaded CPU library, replaces the
    attribute by a method.

    Attributes:
        name: the name in the option `attention_backend`.
        kernels: the kernels that it runs: "torch" (none but torch's), "cpu" or "gpu". See `find_operators`.
        dtypes, head_dims, groups, block_sizes: the values that its kernels support; None supports all. A group is the
            number of query heads that share a KV head.
        variants: the fields of `AttentionVariant` that `attend` reads.
        sampling_values: the fields of `SamplingValues` that `sample` reads. A request that sets another field is
            refused.
        default_block_size: tokens in a block of the KV cache if the user does not choose.
        captures_steps: whether steps can become CUDA graphs.
        device: the device that its tensors are on.
    """

    name: ClassVar[str] = "torch"
    kernels: ClassVar[str] = "torch"
    dtypes: ClassVar[Collection[torch.dtype]] = (torch.bfloat16, torch.float16, torch.float32)
    head_dims: ClassVar[Collection[int] | None] = None
    groups: ClassVar[Collection[int] | None] = None
    block_sizes: ClassVar[tuple[int, ...]] = tuple(2**i for i in range(4, 21))
    variants: ClassVar[Collection[str]] = AttentionVariant._fields
    sampling_values: ClassVar[Collection[str]] = SamplingValues._fields
    default_block_size: ClassVar[int] = 64
    captures_steps: ClassVar[bool] = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    # ---- operators

    step_inputs = staticmethod(step_inputs_reference)
    rms_norm = staticmethod(rms_norm_reference)
    add_rms_norm = staticmethod(add_rms_norm_reference)
    silu_and_mul = staticmethod(silu_and_mul_reference)
    norm_rope_store = staticmethod(norm_rope_store_reference)
    attend = staticmethod(attend_reference)
    sample = staticmethod(sample_reference)
    store_samples = staticmethod(store_samples_reference)
    token_logprobs = staticmethod(token_logprobs_reference)
    top_logits = staticmethod(top_logits_reference)

    def find_operators(self, reference: Callable[["Backend"], T], module: str) -> T:
        """Return operators that only one family of models has, or only one feature.

        Args:
            reference: the class of these operators in plain torch.
            module: the name of a module in backends/cpu and in backends/gpu. Its class `Operators` has them as kernels.
        """
        if self.kernels == "torch":
            return reference(self)
        operators: T = import_module(f"nanovllm.backends.{self.kernels}.{module}").Operators(self)
        return operators

    def prepare_attention(self, inputs: StepInputs, cache: KVCache, num_heads: int) -> StepInputs:
        """Return the inputs with everything that `attend` needs in addition, in `prepared`. All layers share it.

        The runner calls this once per step, before the first layer. If the step becomes a CUDA graph, this call is a
        part of the graph.

        Args:
            cache: the cache of any layer of attention; without such a layer this is not called. Only its shape is used.
            num_heads: number of query heads.
        """
        return inputs

    # ---- a step

    def on_device(self) -> AbstractContextManager[object]:
        """Return a context manager. In its `with` block new work of this thread goes to this backend's device."""
        return nullcontext()

    def choose_threads(self, num_parameters: int) -> None:
        """Choose with how many threads of the CPU the steps of a model are computed. Called once, at load."""

    def with_threads(self) -> AbstractContextManager[object]:
        """Return a context manager. In its `with` block this thread computes a step with as many threads of the CPU as
        `choose_threads` has chosen."""
        return nullcontext()

    def make_steps(self, runner: Any) -> Steps:
        """Return the object that runs the parts of the runner's steps. It is called when the KV cache exists."""
        return EAGER

    def make_staging(self, size: int) -> Staging:
        """Return the buffer through which a step's arrays reach the device: at most `size` int32 values."""
        return Staging(size, self.device)

    def to_device(self, values: NDArray[np.generic]) -> Tensor:
        """Start a copy from the host to the device, and return the copy. The host need not wait for it."""
        return torch.from_numpy(values).to(self.device)

    def start_copy(self, values: Tensor) -> Tensor:
        """Start a copy to the host, and return it. Its values may be read when the device has ended the step.

        It is a copy on a CPU, too: a replayed step writes its results to the same place each time.
        """
        return values.to("cpu", copy=True)

    def make_stopwatch(self) -> Stopwatch:
        """Return the stopwatch of one step. The host's time begins now, and the device's time with `start`."""
        return Stopwatch()

    # ---- memory

    def allocate_cache(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVCache:
        """Return a zeroed cache of one layer. Its shape is [num_blocks, block_size, num_kv_heads, head_dim].

        Its memory has another order: heads come before tokens. So one head of one block is contiguous, as kernels read
        it. A type of one byte holds codes, and gets scales.
        """
        num_blocks, block_size, num_kv_heads, head_dim = shape
        stored = (num_blocks, num_kv_heads, block_size, head_dim)
        parts = [self.zeros(stored, dtype, device) for _ in ("keys", "values")]
        scales = [self.zeros(stored[:3], torch.float32, device) for _ in parts if dtype.itemsize == 1]
        return KVCache(*(part.transpose(1, 2) for part in parts + scales))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for a part of a layer's cache: its keys, its values, or the scales of one of them."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def prepare_weights(self, weights: Iterable[Tensor]) -> None:
        """Prepare the memory of empty parameters, by larger pages, say. Called before weights are loaded."""

    def pack_weights(self, modules: Iterable[nn.Module]) -> None:
        """Change the weights to the form that this backend multiplies fastest. Called when they are loaded."""

    def make_copier(self) -> Callable[[Tensor, Tensor], object]:
        """Return the function that copies weights to the device while they are read: copy(place, values)."""
        return Tensor.copy_

    def free_memory(self) -> int:
        """Return the bytes that can still be allocated on the device."""
        return free_memory()

    def room_beside(self, weights: int, utilization: float) -> int:
        """Return how many bytes states of rows and the KV cache may take, before `weights` bytes are loaded.

        Args:
            utilization: the option `gpu_memory_utilization`. A CPU's limit is that of `room_for_cache`.
        """
        return cpu_cache_budget()

    def room_for_cache(self, runner: Any, most: int) -> int:
        """Return how many bytes the KV cache of one rank takes, if the user gives no size.

        On a CPU, which other programs use too, it is a quarter of the free memory, but at most 4 GiB.

        Args:
            most: the bytes that the longest sequences of all rows would need.
        """
        room: int = cpu_cache_budget() // runner.parallel.ranks_per_device
        num_state_bytes: int = runner.count_state_bytes()
        return min(max(room - num_state_bytes, room // 2), most)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""

    def release_memory(self) -> None:
        """Give memory that no tensor uses back to the system."""

    # ---- start and end

    @classmethod
    def why_cannot(cls, device: torch.device) -> str | None:
        """Return why this backend cannot run on this machine, as a clause of an error message; None if it can."""
        return None

    @classmethod
    def list_kv_cache_dtypes(cls, device: torch.device) -> tuple[str, ...]:
        """Return the values of `kv_cache_dtype` that this backend's kernels support on the device."""
        return ("auto", "int8")

    def compile_kernels(self, runner: Any) -> None:
        """Compile the kernels that steps will run, if any are compiled while a program runs."""

    def why_broken(self) -> str | None:
        """Return why no further step can run after a failed step; None if the next step can run."""
        return None
