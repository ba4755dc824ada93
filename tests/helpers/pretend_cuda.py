"""A CUDA device that is not there: fake tensors that say they are on it, and a driver that launches nothing."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.backends import Backend
from nanovllm.backends.gpu import paged_decode, paged_prefill, product
from nanovllm.backends.gpu.device import CudaBackend
from nanovllm.backends.gpu.launch import Launch, redirect_launches
from nanovllm.backends.staging import Staging
from nanovllm.backends.steps import Stopwatch
from nanovllm.config import EngineConfig
from nanovllm.engine.plan import StepPlan
from nanovllm.load import resolve_options
from nanovllm.models.decoder import find_decoder
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.model_config import load_model_config
from nanovllm.runner.model_runner import ModelRunner

DEVICE = "cuda:0"
aten = torch.ops.aten


def copy(x: Tensor, values: Tensor) -> Tensor:
    """Do what x.copy_(values) does to shapes: torch without CUDA refuses a copy on such a device."""
    assert x.is_cuda and values.is_cuda and torch.broadcast_shapes(x.shape, values.shape) == x.shape
    return x


class _Indexing(TorchFunctionMode):
    """x[...] by operators: torch without CUDA refuses brackets on a tensor of such a device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            return self._get(*args)
        if function is Tensor.__setitem__:
            x, index, value = args
            parts = index if isinstance(index, tuple) else (index,)
            if all(isinstance(part, Tensor) for part in parts):
                return aten.index_put_(x, list(parts), value)
            return self._get(x, index).copy_(value)
        if function is Tensor.copy_:
            return copy(*args)
        return function(*args, **(kwargs or {}))

    def _get(self, x: Tensor, index: Any) -> Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if all(isinstance(part, Tensor) for part in parts):
            return aten.index(x, list(parts))
        dim = 0
        for i, part in enumerate(parts):
            if part is Ellipsis:
                dim = x.dim() - len(parts[i + 1 :])
                continue
            if isinstance(part, int):
                x = aten.select(x, dim, part)
                continue
            if isinstance(part, slice):
                x = aten.slice(x, dim, part.start, part.stop, part.step or 1)
            else:
                x = aten.index(x, [None] * dim + [part])
            dim += 1
        return x


class Operators(TorchDispatchMode):
    """Notes the operators that work on the device, and refuses any that makes a tensor elsewhere."""

    _NO_WORK = ("empty", "view", "slice", "detach", "flatten", "reshape", "unbind", "select", "device", "split")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, (list, tuple)) else [result]:
            assert not isinstance(made, Tensor) or made.is_cuda, f"{function} makes a tensor on the host"
        name = str(function).split(".")[1]
        if not name.startswith(self._NO_WORK):
            self.counts[name] += 1
        return result


@contextmanager
def no_cuda() -> Iterator[None]:
    """Within, a backend for CUDA asks no driver: it has memory enough, and copies give fake tensors of the right
    shape. The GPU is one of compute capability 8.0, for which no layer takes products of our own."""

    def to_device(backend: Backend, values: np.ndarray) -> Tensor:
        return torch.empty(values.shape, dtype=torch.from_numpy(values[:0]).dtype, device=DEVICE)

    stand_ins: dict[str, Any] = {
        "on_device": lambda backend: nullcontext(),
        "make_staging": lambda backend, size: Staging(size, backend.device),
        "to_device": to_device,
        "start_copy": lambda backend, values: values,
        "make_copier": lambda backend: copy,
        "make_stopwatch": lambda backend: Stopwatch(),
        "free_memory": lambda backend: 1 << 40,
        "room_beside": lambda backend, weights, utilization: 1 << 40,
        "synchronize": lambda backend: None,
    }
    with ExitStack() as patches:
        for name, stand_in in stand_ins.items():
            patches.enter_context(mock.patch.object(CudaBackend, name, stand_in))
        patches.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (8, 0)))
        yield


@contextmanager
def pretend_runner(
    model: str = "qwen3-0.6b",
    *,
    dtype: str = "bfloat16",
    num_layers: int | None = None,
    parallel: Parallel | None = None,
    changes: Mapping[str, Any] | None = None,
    runner_class: Callable[..., ModelRunner] = ModelRunner,
    **options: Any,
) -> Iterator[ModelRunner]:
    """A runner on the Triton backend whose tensors are all fake; an operator that needs a value raises.

    Args:
        changes: other values for the preset's config.json.
        runner_class: makes the runner.
    """
    from nanovllm.features.shapes import preset_config

    shape = preset_config(model) | dict(changes or {})
    shape["num_hidden_layers"] = num_layers or shape["num_hidden_layers"]
    hf_config = load_model_config(shape, model)
    asked = EngineConfig(
        model=model, load_format="dummy", device="cpu", attention_backend="torch", dtype=dtype, **options
    )
    config = replace(resolve_options(asked, hf_config), device=DEVICE, attention_backend="triton")
    with (
        mock.patch.object(paged_decode, "num_multiprocessors", lambda device: 132),
        mock.patch.object(product, "num_multiprocessors", lambda device: 132),
        mock.patch.object(paged_decode, "shared_memory_kib", lambda device: 227),
        mock.patch.object(paged_prefill, "shared_memory_kib", lambda device: 227),
        no_cuda(),
        FakeTensorMode(allow_non_fake_inputs=True),
        _Indexing(),
        torch.inference_mode(),
    ):
        runner = runner_class(
            config, hf_config, lambda *arguments: None, parallel or Parallel(), decoder=find_decoder(hf_config)
        )
        runner.caches = runner.make_caches(100)
        yield runner


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Yield a list of the launches, none of which is done. All of them must be launches that CUDA takes."""
    launches: list[Launch] = []
    with redirect_launches(launches.append):
        yield launches
    for one in launches:
        assert max(one.grid[1:], default=1) <= 65_535, f"{one.kernel.__name__} has a grid of {one.grid}"


def unscored_plan(num_scheduled: list[int]) -> StepPlan:
    """A plan of so many tokens for each sequence, all sampled."""
    plan = StepPlan.largest(len(num_scheduled), sum(num_scheduled), sum(num_scheduled))
    return plan._replace(
        num_scheduled=np.array(num_scheduled, np.int32),
        num_scored=np.zeros_like(plan.num_sampled),
        targets=plan.targets[:0],
    )


class PretendDriver:
    """Takes the place of Triton's CUDA driver: compiled kernels are loaded nowhere, and launches are noted."""

    def __init__(self, arch: int = 90) -> None:
        from triton.backends.compiler import GPUTarget

        self.launches: list[tuple[Any, ...]] = []
        self.utils = SimpleNamespace(
            load_binary=lambda name, *rest: (name, name, 0, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
        )
        self.launcher_cls = lambda source, metadata: lambda *arguments: self.launches.append(arguments)
        self.get_current_target = lambda: GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7
