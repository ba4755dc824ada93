"""Which backend is chosen and why not another, what is shared within a step, and flash-attn's calls."""

import sys

import pytest
import torch
from helpers import fake_flash_attn
from helpers.kernel_cases import assert_attends, attention_case, attention_tolerance, mixed_lengths

pytest.importorskip("triton")

from nanovllm.backends import default_block_size, make_backend, resolve_backend
from nanovllm.backends import triton_backend as triton_backend_module
from nanovllm.backends.flash_attn_backend import FlashAttnBackend
from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.backends.triton_backend import TritonBackend
from nanovllm.resolve import resolve_device

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn is installed."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)


@pytest.fixture
def no_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about the GPU are answered as on an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


# ---- selection


def test_auto_takes_flash_attn_where_it_can_run(flash_attn: None, hopper: None) -> None:
    assert resolve_backend("auto", GPU, BF16) == "flash_attn"
    assert resolve_backend("auto", GPU, BF16, block_size=512) == "flash_attn"


def test_auto_takes_triton_where_flash_attn_cannot_run(
    flash_attn: None, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_backend("auto", GPU, torch.float32) == "triton"
    assert resolve_backend("auto", GPU, BF16, block_size=64) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert resolve_backend("auto", GPU, torch.float16) == "triton"


def test_auto_takes_triton_where_flash_attn_is_not_installed(no_flash_attn: None, hopper: None) -> None:
    assert resolve_backend("auto", GPU, BF16) == "triton"


@pytest.mark.parametrize("heads", [(8, 2), (128, 7)], ids=str)
def test_auto_takes_torch_for_heads_that_no_kernel_knows(
    heads: tuple[int, int], flash_attn: None, hopper: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_backend("auto", GPU, BF16, None, (128, 2)) == "flash_attn"
    assert resolve_backend("auto", GPU, BF16, None, heads) == "torch"
    assert "has kernels for" in caplog.text and "slow" in caplog.text


def test_auto_takes_torch_without_cuda_or_without_triton(
    no_flash_attn: None, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_backend("auto", CPU, BF16) == "torch"
    monkeypatch.setattr(triton_backend_module, "HAS_TRITON", False)
    assert resolve_backend("auto", GPU, BF16) == "torch"


def test_a_named_backend_that_cannot_run_says_why_and_what_to_install(
    no_flash_attn: None, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r'flash-attn does not import.*pip install "nano-vllm\[flash-attn\]"'):
        resolve_backend("flash_attn", GPU, BF16)
    with pytest.raises(ValueError, match=r"flash_attn.*needs a CUDA device, not cpu"):
        resolve_backend("flash_attn", CPU, BF16)
    with pytest.raises(ValueError, match=r"float16 and bfloat16, not torch.float32"):
        resolve_backend("flash_attn", GPU, torch.float32)
    with pytest.raises(ValueError, match=r"multiple of 256, not 64"):
        resolve_backend("flash_attn", GPU, BF16, block_size=64)
    with pytest.raises(ValueError, match=r"kvcache_block_size 40"):
        resolve_backend("triton", GPU, BF16, block_size=40)
    with pytest.raises(ValueError, match=r'"flashinfer" is unknown.*"triton"'):
        resolve_backend("flashinfer", GPU, BF16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(ValueError, match=r"8\.0 or more, not 7\.5"):
        resolve_backend("flash_attn", GPU, BF16)
    monkeypatch.setattr(triton_backend_module, "HAS_TRITON", False)
    with pytest.raises(ValueError, match=r"pip install triton"):
        resolve_backend("triton", GPU, BF16)


def test_triton_runs_on_the_cpu_in_its_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend_module, "INTERPRETED", True)
    assert resolve_backend("triton", CPU, torch.float32) == "triton"
    monkeypatch.setattr(triton_backend_module, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"needs a CUDA device, not cpu.*TRITON_INTERPRET=1"):
        resolve_backend("triton", CPU, torch.float32)


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_shapes_without_kernels_are_refused_with_their_numbers(name: str, flash_attn: None) -> None:
    size = default_block_size(name)
    assert make_backend(name, GPU, head_dim=128, group=5, block_size=size).name == name
    with pytest.raises(ValueError, match=r"head_dim of 32, 64, 128, not 96"):
        make_backend(name, GPU, head_dim=96, group=2, block_size=size)
    with pytest.raises(ValueError, match=r"query heads per KV head of 1, 2, 3, 4, 5, 8, not 7"):
        make_backend(name, GPU, head_dim=128, group=7, block_size=size)
    with pytest.raises(ValueError, match=r"kvcache_block_size to be a multiple of \d+ .*, not 40"):
        make_backend(name, GPU, head_dim=128, group=2, block_size=40)
    with pytest.raises(ValueError, match=r"multiple of \d+ .*, not 0"):
        make_backend(name, GPU, head_dim=128, group=2, block_size=0)


def test_every_backends_default_block_size_is_one_it_takes(flash_attn: None) -> None:
    assert [default_block_size(name) for name in ("flash_attn", "triton", "torch")] == [256, 64, 64]
    for backend in (FlashAttnBackend, TritonBackend):
        assert default_block_size(backend.name) in backend.block_sizes


# ---- what a step shares


def test_a_step_is_planned_once_for_all_layers_and_anew_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    plan = triton_backend_module.plan_decode
    monkeypatch.setattr(triton_backend_module, "plan_decode", lambda *args, **kw: made.append(1) or plan(*args, **kw))
    case = attention_case([1, 1], [40, 7], 32, 2, 16, torch.float32)
    backend = TritonBackend()

    def layers(num_layers: int) -> int:
        made.clear()
        for _ in range(num_layers):
            backend.attend(case.q, case.cache, case.metadata, case.scale)
        return len(made)

    assert layers(2) == 2  # no step was begun: right, if slower
    backend.begin_step(case.metadata)
    assert layers(3) == 1
    backend.begin_step(case.metadata)  # the same tensors with new contents, say
    case.metadata.seq_lens.copy_(torch.tensor([33, 12]))
    assert layers(3) == 1


# ---- flash-attn


@pytest.fixture
def on_cpu(flash_attn: None) -> FlashAttnBackend:
    return FlashAttnBackend()


@pytest.mark.parametrize("group", [1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_flash_attn_is_called_as_documented_and_agrees_with_torch(
    on_cpu: FlashAttnBackend, group: int, dtype: torch.dtype
) -> None:
    query_lens, seq_lens = mixed_lengths(256)
    cases = {
        "mixed": (query_lens, seq_lens),
        "decodes": ([1, 1, 1], [300, 0, 1]),  # one of them padding
        "prefills": ([5, 256], [5, 300]),
    }
    for lengths in cases.values():
        case = attention_case(*lengths, 64, group, 256, dtype, backend=on_cpu, device=CPU)
        assert_attends(case, on_cpu, attention_tolerance(dtype))


def test_flash_attn_keeps_tokens_before_heads_in_blocks_of_256(on_cpu: FlashAttnBackend) -> None:
    for side in on_cpu.allocate_cache(3, 512, 2, 64, BF16, CPU):
        assert side.shape == (3, 512, 2, 64) and side.is_contiguous() and not side.any()
    with pytest.raises(ValueError, match="multiple of 256"):
        on_cpu.allocate_cache(3, 64, 2, 64, BF16, CPU)


def test_flash_attn_needs_host_lengths_for_prefills(on_cpu: FlashAttnBackend) -> None:
    from dataclasses import replace

    case = attention_case([2], [2], 64, 1, 256, BF16, backend=on_cpu, device=CPU)
    with pytest.raises(RuntimeError, match="seq_lens_cpu"):
        on_cpu.attend(case.q, case.cache, replace(case.metadata, query_lens_cpu=None), case.scale)


def test_caches_of_all_backends_are_zeroed_and_have_one_logical_shape(on_cpu: FlashAttnBackend) -> None:
    for backend in (on_cpu, TritonBackend(), TorchBackend()):
        for side in backend.allocate_cache(3, 256, 2, 64, torch.float32, CPU):
            assert side.shape == (3, 256, 2, 64) and side.stride(-1) == 1 and not side.any()


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 3), ("current_device", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert resolve_device("cuda") == resolve_device("auto") == torch.device("cuda:2")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="there are 3 CUDA devices"):
        resolve_device("cuda:3")
