"""Which backend is chosen and why not another, what is shared within a step, and flash-attn's calls."""

import sys

import pytest
import torch
from helpers import fake_flash_attn
from helpers.kernel_cases import assert_attends, attention_case, attention_tolerance, mixed_lengths, vary_case

pytest.importorskip("triton")

from nanovllm.backends import NAMES, Backend, find_backend
from nanovllm.backends.gpu import triton_backend as triton_backend_module
from nanovllm.backends.gpu.flash_attn_backend import FlashAttnBackend
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.config import CHOICES, WORTH_COMPILING
from nanovllm.ops.sample import SamplingValues
from nanovllm.runner.resolve import (
    Work,
    resolve_backend,
    resolve_device,
    resolve_dtype,
    why_cannot,
)

CPU = torch.device("cpu")
GPU = torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn is installed."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)


@pytest.fixture
def no_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is not installed, and no backend that needs it is imported yet."""
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("flash_attn_backend", "triton_backend", "triton_shim"):
        monkeypatch.delitem(sys.modules, f"nanovllm.backends.gpu.{name}")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about the GPU are answered as on an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def chosen(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int | None = None,
    heads: tuple[int, int] = (128, 2),
) -> str:
    """heads: (head_dim, query heads per KV head)."""
    return resolve_backend(name, Work(device, dtype, *heads, block_size)).name


# ---- selection


def test_the_options_names_are_the_backends() -> None:
    assert ("auto", *NAMES) == CHOICES["attention_backend"]


def test_auto_takes_triton_which_was_faster_and_flash_attn_for_blocks_that_only_it_has(
    flash_attn: None, hopper: None
) -> None:
    assert chosen("auto", GPU, BF16) == chosen("auto", GPU, torch.float32) == "triton"
    assert chosen("auto", GPU, BF16, block_size=256) == "triton"
    assert chosen("auto", GPU, BF16, block_size=512) == "flash_attn"


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_flash_attn_refuses_a_cache_of_codes(name: str, flash_attn: None, hopper: None) -> None:
    work = Work(GPU, BF16, 128, 2, kv_cache_dtype=name)
    assert resolve_backend("auto", work).name == "triton"
    with pytest.raises(ValueError, match=rf'flash_attn.*kv_cache_dtype.*"?{name}.*"auto"'):
        resolve_backend("flash_attn", work)


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((10, 0), True)])
def test_fp8_needs_a_gpu_that_knows_it(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert ("fp8" in triton_backend_module.TritonBackend.list_kv_cache_dtypes(GPU)) == runs
    assert "fp8" not in triton_backend_module.TritonBackend.list_kv_cache_dtypes(CPU)
    if not runs:
        with pytest.raises(ValueError, match="kv_cache_dtype of auto, int8, not fp8"):
            resolve_backend("auto", Work(GPU, torch.bfloat16, head_dim=128, group=2, kv_cache_dtype="fp8"))


def test_auto_takes_triton_where_flash_attn_is_not_installed(no_flash_attn: None, hopper: None) -> None:
    assert chosen("auto", GPU, BF16) == "triton"


@pytest.mark.parametrize("heads", [(8, 2), (128, 9)], ids=str)
def test_auto_takes_torch_for_heads_that_no_kernel_knows(
    heads: tuple[int, int], flash_attn: None, hopper: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen("auto", GPU, BF16, None, (128, 2)) == "triton"
    assert not caplog.text
    assert chosen("auto", GPU, BF16, None, heads) == "torch"
    assert "has kernels for" in caplog.text and "plain torch" in caplog.text


def test_auto_takes_torch_without_cuda_or_without_triton(hopper: None, no_triton: None) -> None:
    assert chosen("auto", CPU, BF16) == "torch"
    assert chosen("auto", GPU, BF16) == "torch"


def test_on_a_cpu_auto_takes_the_compiled_kernels_for_models_that_are_worth_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []
    monkeypatch.setattr("nanovllm.backends.cpu.backend.cpu_library", lambda: asked.append(1))
    small, large = (Work(CPU, BF16, 128, 2, 64, n) for n in (WORTH_COMPILING - 1, WORTH_COMPILING))
    assert resolve_backend("auto", small).name == "torch"
    for odd in (
        large._replace(dtype=torch.float16),
        large._replace(head_dim=100),
        large._replace(head_dim=512),
        large._replace(group=49),
    ):
        caplog.clear()
        assert resolve_backend("auto", odd).name == "torch"
        assert "plain torch" in caplog.text and "has kernels for" in caplog.text
    assert not asked, "nothing is compiled for nothing"
    assert resolve_backend("auto", large).name == resolve_backend("cpu", small).name == "cpu"
    assert len(asked) == 2


@pytest.mark.parametrize("native", [False, True])
def test_auto_takes_the_models_bfloat16_wherever_something_computes_it(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch would emulate it where the processor does not know it; our kernels read half the bytes and widen."""
    monkeypatch.setattr("nanovllm.backends.cpu.backend.cpu_library", lambda: None)
    monkeypatch.setattr("nanovllm.runner.resolve.has_native_bfloat16", lambda device: native or device.type == "cuda")
    large = Work(CPU, BF16, 128, 2, 64, WORTH_COMPILING)
    small = large._replace(num_parameters=WORTH_COMPILING - 1)
    odd = large._replace(head_dim=100)
    emulated = BF16 if native else torch.float32
    for backend, work, expected in (
        ("auto", large, BF16),
        ("cpu", small, BF16),
        ("auto", small, emulated),
        ("torch", large, emulated),
        ("auto", odd, emulated),
        ("auto", odd._replace(device=GPU), BF16),
        ("auto", large._replace(dtype=torch.float16), torch.float32),
        ("auto", large._replace(dtype=torch.float16, device=GPU), torch.float16),
    ):
        assert resolve_dtype("auto", backend, work) == expected, (backend, work)
        assert resolve_dtype("float16", backend, work) == torch.float16


def test_a_named_backend_that_cannot_run_says_why_and_what_to_install(
    no_flash_attn: None, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"flash-attn does not import.*pip install flash-attn"):
        chosen("flash_attn", GPU, BF16)
    with pytest.raises(ValueError, match=r"flash_attn.*needs a CUDA device, not cpu.*\"auto\""):
        chosen("flash_attn", CPU, BF16)
    with pytest.raises(ValueError, match=r"float16, torch.bfloat16, not torch.float32"):
        chosen("flash_attn", GPU, torch.float32)
    with pytest.raises(ValueError, match=r"cpu.*torch.bfloat16, torch.float32, not torch.float16"):
        chosen("cpu", CPU, torch.float16)
    with pytest.raises(ValueError, match=r"cpu.*needs the CPU, not cuda"):
        chosen("cpu", GPU, BF16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    with pytest.raises(ValueError, match=r"8\.0 or more, not 7\.5"):
        chosen("flash_attn", GPU, BF16)


def test_an_error_names_what_cannot_be_imported_and_triton_can_be_installed(
    no_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"here: triton cannot be imported.*pip install triton"):
        chosen("triton", GPU, BF16)
    monkeypatch.setitem(sys.modules, "nanovllm.backends.gpu.device", None)
    with pytest.raises(ValueError, match=r"here: nanovllm\.backends\.gpu\.device cannot be imported \([^)]*\); or use"):
        chosen("triton", GPU, BF16)


def test_triton_runs_on_the_cpu_in_its_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend_module, "INTERPRETED", True)
    assert chosen("triton", CPU, torch.float32) == "triton"
    monkeypatch.setattr(triton_backend_module, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"needs a CUDA device, not cpu.*TRITON_INTERPRET=1"):
        chosen("triton", CPU, torch.float32)


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_shapes_without_kernels_are_refused_with_their_numbers(name: str, flash_attn: None, hopper: None) -> None:
    assert chosen(name, GPU, BF16, None, (128, 5)) == name
    with pytest.raises(ValueError, match=r"head_dim of 32, 64, 128, 256, not 96"):
        chosen(name, GPU, BF16, None, (96, 2))
    with pytest.raises(ValueError, match=r"query heads per KV head of 1, 2, 3, 4, 5, 6, 7, 8, 16, not 9"):
        chosen(name, GPU, BF16, None, (128, 9))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("triton", (16, 256), (8, 40, 512)),
        ("flash_attn", (256, 512), (64, 768)),
        ("cpu", (16, 4096), (8, 80)),
        ("torch", (16, 4096), (8, 80)),
    ],
)
def test_block_sizes_are_powers_of_two_within_what_the_backend_knows(
    name: str, good: tuple[int, ...], bad: tuple[int, ...], flash_attn: None, hopper: None
) -> None:
    device = CPU if name == "cpu" else GPU
    backend = find_backend(name, device)
    work = Work(device, BF16, 128, 2)
    for size in (backend.default_block_size, *good):
        assert not (reason := why_cannot(name, work._replace(block_size=size))), reason
    for size in bad:
        with pytest.raises(ValueError, match=f"kvcache_block_size is {size}; .*a power of two from {good[0]} to"):
            resolve_backend(name, work._replace(block_size=size))
    with pytest.raises(ValueError, match=r"^kvcache_block_size is 40; it must be a power of two from 16"):
        resolve_backend("auto", work._replace(block_size=40))


def test_auto_passes_over_a_backend_without_a_variant_of_attention_that_layers_need(
    flash_attn: None, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlashAttnBackend, "variants", ("window", "softcap"))
    work = Work(GPU, BF16, 128, 2, 512, variants=("window",))
    assert resolve_backend("auto", work).name == "flash_attn"
    work = work._replace(variants=("window", "sinks"))
    assert resolve_backend("auto", work).name == "torch"
    assert resolve_backend("auto", work._replace(block_size=256)).name == "triton"
    with pytest.raises(ValueError, match=r"no kernels for the sinks of the model's attention; or use .*auto"):
        resolve_backend("flash_attn", work)


@pytest.mark.parametrize(("name", "device"), [("cpu", CPU), ("triton", CPU), ("triton", GPU), ("flash_attn", GPU)])
def test_a_sampler_of_its_own_names_the_values_that_it_reads(name: str, device: torch.device) -> None:
    """So a value that only the reference reads is refused, and never ignored."""
    bases = find_backend(name, device).__mro__
    owner = next(base for base in bases if "sample" in vars(base))
    assert owner is not Backend
    assert "sampling_values" in vars(owner)
    assert set(owner.sampling_values) <= {*SamplingValues._fields}


# ---- what a step shares


def test_a_step_is_cut_into_chunks_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    cut = triton_backend_module.decode_metadata
    monkeypatch.setattr(triton_backend_module, "decode_metadata", lambda *args: made.append(1) or cut(*args))
    case = attention_case([1, 1], [40, 7], 32, 2, 16, torch.float32)
    backend = TritonKernels()
    inputs = backend.prepare_attention(case.inputs, case.cache, case.q.shape[1])
    first, second = (backend.attend(case.q, case.cache, inputs, case.scale) for _ in range(2))
    assert len(made) == 1 and torch.equal(first, second)
    assert backend.prepare_attention(case.inputs, case.cache, case.q.shape[1]).prepared is not inputs.prepared
    with pytest.raises(AssertionError, match="prepare_attention was not called"):
        backend.attend(case.q, case.cache, case.inputs, case.scale)


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
        for window, softcap in ((None, None), (20, None), (None, 2.0), (1000, 3.0)):
            varied = vary_case(case, window, softcap, has_sinks=False)
            assert_attends(varied, on_cpu, attention_tolerance(dtype))


def test_flash_attn_says_that_it_has_no_sinks(on_cpu: FlashAttnBackend) -> None:
    assert {"window", "softcap", "sinks"} - {*FlashAttnBackend.variants} == {"sinks"}
    case = attention_case([1], [5], 64, 1, 256, BF16, backend=on_cpu, device=CPU)
    with pytest.raises(AssertionError, match="sinks"):
        vary_case(case, None, None, has_sinks=True).attend(on_cpu)


def test_flash_attn_keeps_tokens_before_heads_in_blocks_of_256(on_cpu: FlashAttnBackend) -> None:
    for side in on_cpu.allocate_cache((3, 512, 2, 64), BF16, CPU)[:2]:
        assert side.shape == (3, 512, 2, 64) and side.is_contiguous() and not side.any()
    assert all(size % 256 == 0 for size in FlashAttnBackend.block_sizes)


def test_flash_attn_needs_host_lengths_for_prefills(on_cpu: FlashAttnBackend) -> None:
    from dataclasses import replace

    case = attention_case([2], [2], 64, 1, 256, BF16, backend=on_cpu, device=CPU)
    with pytest.raises(RuntimeError, match="seq_lens_cpu"):
        on_cpu.prepare_attention(replace(case.inputs, query_lens_cpu=None), case.cache, case.q.shape[1])


def test_caches_of_all_backends_are_zeroed_and_have_one_logical_shape(on_cpu: FlashAttnBackend) -> None:
    for backend in (on_cpu, TritonKernels(), TorchBackend()):
        for side in backend.allocate_cache((3, 256, 2, 64), torch.float32, CPU)[:2]:
            assert side.shape == (3, 256, 2, 64) and side.stride(-1) == 1 and not side.any()


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 3), ("current_device", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert resolve_device("cuda") == resolve_device("auto") == torch.device("cuda:2")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="there are 3 CUDA devices"):
        resolve_device("cuda:3")
