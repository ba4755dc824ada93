"""The compiled CPU path computes what plain torch computes, and the engine does without it where it must."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cpu_checks import (
    BF16,
    CPU,
    FP32,
    VARIANTS,
    Kind,
    alike_tolerance,
    assert_attends_alike,
    attend_after_storing,
    check_codes,
    check_packed_products,
    check_sampled_tokens,
    check_small_operators,
    make_variant,
    rounding,
)
from helpers.kernel_cases import check_edges_of_sampling, check_step_inputs, check_token_logprobs, pack_values
from helpers.processes import is_alive, wait_for
from helpers.tiny import draw_prompts
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.backends.cpu import backend as backend_module
from nanovllm.backends.cpu import builder
from nanovllm.backends.cpu import library as library_module
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.library import CpuLibrary, cpu_library
from nanovllm.backends.torch_backend import OneDnnMatrix, TorchBackend
from nanovllm.engine.plan import ROW_SAMPLING
from nanovllm.ops.attention import AttentionVariant, KVCache
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.ops.sample import store_samples_reference
from nanovllm.ops.token_logprobs import top_logits_reference
from nanovllm.runner.head_inputs import HeadInputs
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.resolve import Work, resolve_backend
from nanovllm.utils.machine import limit_threads, physical_cores

GRID = [
    (head_dim, group, (16, 64, 256)[(i + j) % 3])
    for i, head_dim in enumerate((32, 64, 96, 128, 256))
    for j, group in enumerate((1, 2, 4, 7, 8, 48))
]
"""(head_dim, group, block_size) such that every pair of values of any two of them occurs."""


@pytest.fixture(scope="module")
def library() -> CpuLibrary:
    """The library in the user's cache, which every test of the engine shares."""
    try:
        return cpu_library()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cache(library: CpuLibrary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own that holds the library, for tests of what becomes of one."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "nanovllm").mkdir(mode=0o700)
    shutil.copy(library.library._name, cache / "nanovllm")
    yield cache
    cpu_library.cache_clear()


@pytest.fixture(scope="module")
def backend(library: CpuLibrary) -> CpuBackend:
    return CpuBackend()


def test_a_new_cache_is_zeros_in_memory_of_its_own(library: CpuLibrary) -> None:
    caches = [library.zeros((3, 2, 100, 32), dtype) for dtype in (BF16, FP32)]
    caches[0].fill_(1)
    assert caches[0].shape == caches[1].shape and not caches[1].any()
    assert not any(cache.data_ptr() % 64 for cache in caches)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (72, 64), (208, 50), (1024, 16)])
def test_a_packed_matrix_multiplies_and_gives_its_rows(
    library: CpuLibrary, dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    check_packed_products(library, dtype, in_features, out_features)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_small_operators_equal_their_references(backend: CpuBackend, dtype: torch.dtype) -> None:
    check_small_operators(backend, dtype)


@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("tokens", [1, 8, 9, 10, 47])
def test_threads_never_share_two_tokens_of_one_unit(backend: CpuBackend, tokens: int, first: int) -> None:
    """Two values lie in one unit of V; where threads divide the tokens between them, both have one owner."""
    qkv = torch.randn(tokens, (16 + 2 * 2) * 128).to(BF16)  # enough that even few tokens wake the threads
    weight = torch.rand(128).to(BF16)
    cos_sin = torch.rand(64, 128)
    positions = torch.arange(first, first + tokens)
    caches = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            cache = backend.allocate_cache((1, 64, 2, 128), BF16, CPU)
            backend.norm_rope_store(qkv, NormRope(weight, weight, 1e-6, cos_sin), positions, cache, positions)
            caches.append(cache)
    finally:
        torch.set_num_threads(threads)
    stored = caches[0][1].count_nonzero() / (2 * 128)
    assert stored == pytest.approx(tokens, abs=0.2)  # a random value may be zero
    for cache in caches[1:]:
        assert all(torch.equal(*sides) for sides in zip(cache[:2], caches[0][:2], strict=True))


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((128, 2, 64), VARIANTS[0]),
        ((32, 3, 16), VARIANTS[1]),
        ((64, 5, 256), VARIANTS[2]),
        ((64, 7, 64), VARIANTS[3]),
        ((96, 6, 64), VARIANTS[4]),
        ((128, 16, 64), VARIANTS[5]),
    ],
    ids=str,
)
def test_attention_over_what_was_stored_equals_the_reference(
    backend: CpuBackend,
    shape: tuple[int, int, int],
    kind: Kind,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    """Plain attention, and one variant for each shape."""
    for variant in (None, make_variant(kind, 2 * shape[1])):
        assert_attends_alike(backend, shape, dtype, kv_dtype, variant)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_a_cap_above_the_scores_loses_no_precision(backend: CpuBackend, kv_dtype: torch.dtype | None) -> None:
    """Scores are a few units, so larger caps change ever less. torch's own tanh is the oracle."""
    for softcap in (20.0, 300.0, 1e4, 1e7, 3e38):
        assert_attends_alike(backend, (64, 4, 64), FP32, kv_dtype, AttentionVariant(softcap=softcap))


@pytest.mark.parametrize("window", [None, 2, 100])
def test_a_sink_of_minus_infinity_is_no_sink(backend: CpuBackend, window: int | None) -> None:
    """Also for queries that see no key of the first tile, because of the window."""
    sinks = torch.full((6,), -torch.inf)
    how = ([200, 1], [200, 300], (64, 3, 32), FP32, FP32)
    got = attend_after_storing(backend, *how, AttentionVariant(window, sinks=sinks))
    assert torch.equal(got, attend_after_storing(backend, *how, AttentionVariant(window)))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "shape"), list(enumerate(GRID)), ids=str)
def test_attention_equals_the_reference_for_every_pair_of_values(
    backend: CpuBackend, number: int, shape: tuple[int, int, int]
) -> None:
    """A shape has two of the four pairs of types, and its neighbours have the other two."""
    kind = VARIANTS[number % len(VARIANTS)]
    types = ((BF16, None), (FP32, torch.int8)) if (number + number // 6) % 2 else ((BF16, torch.int8), (FP32, None))
    for dtype, kv_dtype in types:
        for variant in (None, make_variant(kind, 2 * shape[1])):
            assert_attends_alike(backend, shape, dtype, kv_dtype, variant)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("dim", [32, 128, 256])
def test_codes_and_scales_are_the_references_to_the_last_bit(backend: CpuBackend, dim: int, dtype: torch.dtype) -> None:
    """Heads of all magnitudes, zeros, the smallest numbers, infinities and NaN. Nothing is normed or rotated."""
    check_codes(backend, dim, dtype)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_padding_attends_to_nothing_and_is_zero(
    backend: CpuBackend, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    for sinks in (None, make_variant((None, None, True), 4)):
        out = attend_after_storing(backend, [1, 1, 1], [0, 5, 0], (64, 2, 16), dtype, kv_dtype or dtype, sinks)
        assert not out[[0, 2]].any() and out[1].any()


class TwiceBackend(CpuBackend):
    """Attends to values with scales of NaN first, so that NaN is left wherever the kernel keeps scales."""

    def attend(self, q: Tensor, cache: KVCache, *rest: Any) -> Tensor:
        assert cache.value_scales is not None
        super().attend(q, cache._replace(value_scales=torch.full_like(cache.value_scales, torch.nan)), *rest)
        return super().attend(q, cache, *rest)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_scales_of_keys_that_were_attended_to_before_change_nothing(library: CpuLibrary, dtype: torch.dtype) -> None:
    how = ([1, 1, 1], [5, 70, 600], (64, 2, 64), dtype, torch.int8)
    expected = attend_after_storing(TorchBackend(), *how)
    got = attend_after_storing(TwiceBackend(), *how)
    torch.testing.assert_close(got, expected, atol=alike_tolerance(dtype, torch.int8), rtol=0)


def test_tokens_at_the_edges_of_the_rules_are_those_of_a_plain_search(backend: CpuBackend) -> None:
    check_edges_of_sampling(backend.sample)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("vocab_size", [50, 4096, 20001, 151936])
def test_sampled_tokens_are_the_references(backend: CpuBackend, vocab_size: int, dtype: torch.dtype) -> None:
    check_sampled_tokens(backend, vocab_size, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("vocab_size", [1, 700, 9001])
def test_log_probabilities_are_the_references(backend: CpuBackend, vocab_size: int, dtype: torch.dtype) -> None:
    check_token_logprobs(backend.token_logprobs, vocab_size, dtype, CPU)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (17, 17), (64, 3), (700, 1), (700, 64), (700, 700), (9001, 64)])
def test_the_highest_logits_are_those_of_a_stable_sort(
    backend: CpuBackend, vocab_size: int, k: int, dtype: torch.dtype
) -> None:
    """Of equals, which bfloat16 has many of, the first come first. Rows with NaN have k tokens, whichever."""
    generator = torch.Generator().manual_seed(k)
    logits = (8 * torch.randn(9, vocab_size, generator=generator)).to(dtype)
    logits[1] = torch.arange(vocab_size)
    logits[2] = -logits[1]
    logits[3] = 5
    logits[4] = -torch.inf
    logits[5, vocab_size // 2 :] = -torch.inf
    logits[6, -1] = torch.inf
    values, ids = backend.top_logits(logits, k)
    expected = logits.float().sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :k]) and torch.equal(ids, expected.indices[:, :k].int())
    assert torch.equal(values, top_logits_reference(logits, k)[0])
    logits[7:, ::2] = torch.nan
    ids = backend.top_logits(logits, k)[1]
    assert all(len(set(row)) == k and set(row) <= set(range(vocab_size)) for row in ids[7:].tolist())


@pytest.mark.parametrize("scheduled", [[1] * 5, [1, 1, 1, 300, 7], [600]])
def test_step_inputs_are_the_references(backend: CpuBackend, scheduled: list[int]) -> None:
    check_step_inputs(backend.step_inputs, scheduled, CPU)


def test_samples_are_stored_where_their_rows_read_them(backend: CpuBackend) -> None:
    tokens = torch.tensor([11, 12, 13, 14], dtype=torch.int32)
    rows = torch.tensor([4, 0, 8, 4], dtype=torch.int32)  # with drafts a row may come twice, and keeps either token
    for store in (backend.store_samples, store_samples_reference):
        last_token = torch.full((9,), -1, dtype=torch.int32)
        store(tokens, rows, last_token)
        assert last_token[4] in (11, 14)
        last_token[4] = -1
        assert last_token.tolist() == [12, -1, -1, -1, -1, -1, -1, -1, 13]


def test_the_sampler_s_row_has_the_fields_of_the_plan_s() -> None:
    """RowSampling in C++ is laid out as ROW_SAMPLING: the same names and types in the same order, all of 4 bytes."""
    source = (Path(backend_module.__file__).parent / "sample.h").read_text()
    (body,) = re.findall(r"struct RowSampling \{(.*?)\};", source, re.DOTALL)
    types = {"int32_t": "<i4", "uint32_t": "<u4", "float": "<f4"}
    fields = [(name, types[kind]) for kind, name in re.findall(r"(\w+) (\w+);", body)]
    assert fields == ROW_SAMPLING.descr


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_top_p_that_is_zero_in_float32_keeps_the_likeliest_token(backend: CpuBackend, top_k: int) -> None:
    logits = torch.randn(3, 20001, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(3, dtype=torch.int32)
    table = pack_values(3, rows, top_k=top_k, top_p=1e-300)
    assert torch.equal(backend.sample(logits, table, rows, rows).token_ids, logits.argmax(1).int())


def test_impossible_tokens_are_never_drawn(backend: CpuBackend) -> None:
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, [17, 4999]] = 0.0
    rows = torch.arange(400, dtype=torch.int32)
    tokens = backend.sample(logits.repeat(400, 1), pack_values(400, rows), rows, rows).token_ids
    counts = torch.bincount(tokens, minlength=5000)
    assert counts[17] + counts[4999] == 400
    assert 140 < counts[17] < 260  # six standard deviations of a fair coin


def test_greedy_and_seeded_tokens_are_those_of_plain_torch(library: CpuLibrary, random_model: Path) -> None:
    prompts = draw_prompts([1, 15, 16, 17, 63, 64, 65, 100])
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=24) for i in range(len(prompts))]
    outputs = []
    for backend in ("torch", "cpu"):
        options = {"max_model_len": 128, "kvcache_block_size": 16, "num_kvcache_blocks": 20}
        options |= {"device": "cpu", "dtype": "float32", "attention_backend": backend}
        with LLM(random_model, max_num_batched_tokens=50, **options) as llm:
            assert llm.engine.runner.backend.name == backend
            outputs.append([o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)])
            assert llm.stats()["num_preemptions"] > 0
    assert outputs[0] == outputs[1]


def test_without_a_compiler_auto_takes_plain_torch_and_says_so_and_cpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    work = Work(CPU, FP32, 128, 2, 64, num_parameters=10_000_000_000)
    for path, compiler, said in (
        (str(tmp_path), "", "no C++ compiler"),
        ("/usr/bin:/bin", "false", "cannot be compiled"),
    ):
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("CXX", compiler)
        cpu_library.cache_clear()
        with caplog.at_level(logging.WARNING):
            assert resolve_backend("auto", work).name == "torch"
        assert "plain torch" in caplog.text and said in caplog.text
        with pytest.raises(ValueError, match=f'attention_backend="cpu" cannot run here: .*{re.escape(said)}'):
            resolve_backend("cpu", work)
    cpu_library.cache_clear()


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile in two seconds instead of seven: without optimisation, for tests of what becomes of a library."""
    compiler = tmp_path_factory.mktemp("compiler") / "c++"
    compiler.write_text(
        '#!/bin/sh\nfor a; do shift; test "$a" = -O3 && a=-O0; set -- "$@" "$a"; done\n'
        f'exec {os.environ.get("CXX") or "g++"} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def works(library: CpuLibrary) -> bool:
    weight = torch.randn(64, 32)
    y = torch.empty(1, 64)
    x = torch.randn(1, 32)
    library.call("linear", FP32, x, library.pack(weight), None, y, 1, 32, 64)
    return torch.allclose(y, x @ weight.T, atol=1e-5)


@pytest.mark.parametrize(("surplus", "missing"), [((5,), 0), ((), 1)])
def test_a_wrong_number_of_arguments_is_refused_before_it_reaches_c(
    library: CpuLibrary, surplus: tuple[int, ...], missing: int
) -> None:
    """ctypes passes surplus arguments on, and C++ then takes them for others: one ended in free(): invalid pointer."""
    right = (torch.ones(2, 32), torch.empty(2, 16), 2, 16)
    wrong = (*right[: len(right) - missing], *surplus)
    with pytest.raises(TypeError, match=f"silu_and_mul takes 4 arguments, not {len(wrong)}"):
        library.call("silu_and_mul", FP32, *wrong)


def test_the_library_is_compiled_once(cache: Path, library: CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    before = [path.stat().st_mtime_ns for path in cache.rglob("*")]
    cpu_library.cache_clear()
    cpu_library()
    assert [path.stat().st_mtime_ns for path in cache.rglob("*")] == before
    assert len(list(cache.rglob("*.so"))) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_where_the_cache_cannot_be_written_each_process_compiles_and_says_so(
    library: CpuLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()  # root may write into a folder that is read-only
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cpu_library.cache_clear()
    assert works(cpu_library())
    assert "compiled anew by each process" in caplog.text and str(tmp_path / "file") in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"
    cpu_library.cache_clear()


def test_what_lies_in_a_cache_that_cannot_be_written_is_used(
    cache: Path, library: CpuLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(Path, "mkdir", lambda *arguments, **options: pytest.fail("a folder is made"))
    monkeypatch.setattr(library_module, "_compile", lambda *arguments: pytest.fail("a library is compiled"))
    cpu_library.cache_clear()
    assert works(cpu_library())


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_another_processor_with_the_same_home_has_kernels_of_its_own(
    cache: Path, library: CpuLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """-march=native: what was built for one may be an illegal instruction on the other."""
    (tmp_path / "nanovllm").symlink_to(cache / "nanovllm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = set(cache.rglob("*.so"))
    monkeypatch.setattr("nanovllm.backends.cpu.library.describe_target", lambda compiler: "#define __another__ 1")
    cpu_library.cache_clear()
    with caplog.at_level(logging.INFO):
        cpu_library()
    (new,) = set(cache.rglob("*.so")) - before
    assert before and "compiled the CPU kernels in" in caplog.text and new.name in caplog.text
    new.unlink()
    cpu_library.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_two_processes_that_compile_at_once_both_run_and_leave_one_library(tmp_path: Path) -> None:
    code = "from nanovllm.backends.cpu.library import cpu_library; print(cpu_library().library._name)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = [process.communicate(timeout=300)[0] for process in both]
    assert paths[0] == paths[1] != "" and all(process.returncode == 0 for process in both)
    (left,) = (tmp_path / "nanovllm").iterdir()
    assert left.suffix == ".so"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def put_a_folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").touch()


def put_a_pipe_in_its_place(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def let_others_write(path: Path) -> None:
    path.chmod(0o666)


@pytest.fixture
def copying_compiler(
    library: CpuLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Compile in no time: it copies the library, for tests of what becomes of one."""
    compiler = tmp_path_factory.mktemp("compiler") / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-dM*) exit;; esac\nwhile test "$1" != -o; do shift; done\n'
        f'exec cp {library.library._name} "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


DAMAGES = (cut, change_a_byte, put_a_folder_in_its_place, put_a_pipe_in_its_place, let_others_write)


@pytest.mark.usefixtures("copying_compiler")
def test_a_damaged_library_is_never_loaded_and_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library.cache_clear()
    path = Path(cpu_library().library._name)
    content = path.read_bytes()
    for damage in DAMAGES:
        path.rename(path.with_suffix(".moved"))  # this process has loaded the file, which must not change
        path.write_bytes(content)
        damage(path)
        caplog.clear()
        cpu_library.cache_clear()
        assert works(cpu_library())
        assert f"compiling anew, because this file is damaged, or others may write to it: {path}" in caplog.text
        assert path.read_bytes() == content
        caplog.clear()
        cpu_library.cache_clear()
        assert works(cpu_library()) and not caplog.text, "the new one is kept"
        path.with_suffix(".moved").unlink()
    cpu_library.cache_clear()


@pytest.mark.usefixtures("copying_compiler")
@pytest.mark.parametrize("danger", ["mode", "owner"])
def test_a_cache_folder_that_others_may_write_to_is_refused_by_name(
    danger: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = tmp_path / "nanovllm"
    folder.mkdir(mode=0o700)
    if danger == "mode":
        folder.chmod(0o770)
        said = f"others may write to {folder} (its mode is 770)"
    elif os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        said = f"{folder} belongs to user 65534, and this is user 0"
    else:
        pytest.skip("only root may give a folder away")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library.cache_clear()
    assert works(cpu_library())
    cpu_library.cache_clear()
    assert f"{said}. Move it away, and make one that only you may write to: mkdir -m 700 {folder}" in caplog.text
    assert not list(folder.iterdir())


COMPILE = "from nanovllm.backends.cpu.library import cpu_library; cpu_library()"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_compiler_ends_with_its_parent_and_nothing_is_left(number: signal.Signals, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-dM*) exit;; esac\ntouch "$TMPDIR/file"\n'
        f"sh -c 'echo $$ > {tmp_path}/pid; sleep 300' & wait\n"
    )
    compiler.chmod(0o755)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    process = subprocess.Popen([sys.executable, "-c", COMPILE], env=environment, stderr=subprocess.DEVNULL)
    pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    assert is_alive(pid) and len(list((tmp_path / "nanovllm").iterdir())) == 1
    process.send_signal(number)
    process.wait(50)
    wait_for(lambda: not is_alive(pid))
    wait_for(lambda: not list((tmp_path / "nanovllm").iterdir()))


def test_the_next_start_removes_what_killed_compilers_have_left_and_nothing_else(tmp_path: Path) -> None:
    left = tmp_path / f"{builder.PREFIX}left"
    left.mkdir()
    (left / "library.so").touch()
    other = tmp_path / "bench"
    other.mkdir()
    compiling = Path(builder.make_folder(str(tmp_path)))  # locked, as long as this process lives
    code = "import sys; sys.path.insert(0, sys.argv[1]); from builder import *; remove_remains(Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-S", "-c", code, str(library_module.SOURCES), str(tmp_path)], check=True)
    assert sorted(tmp_path.iterdir()) == sorted([other, compiling])


@pytest.mark.skipif(
    not OneDnnMatrix.is_supported(torch.empty(0, dtype=BF16)), reason="needs oneDNN's packed bfloat16 product"
)
def test_onednns_packed_product_equals_the_plain_one() -> None:
    torch.manual_seed(3)
    weight = torch.randn(96, 64).to(BF16)
    x = torch.randn(7, 64).to(BF16)
    bias = torch.randn(96).to(BF16)
    for b in (None, bias):
        got = OneDnnMatrix(weight).multiply(x, b)
        torch.testing.assert_close(got, F.linear(x, weight, b), rtol=rounding(BF16), atol=rounding(BF16) * 8)


def test_plain_torch_computes_a_small_model_in_one_thread_unless_the_user_says_how_many(
    reciter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, threads that wait for each other at every product cost a hundred times what they save."""
    threads = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen = []
    run_layers = ModelRunner.run_layers

    def look(*arguments: Any) -> HeadInputs:
        seen.append(threads[-1])
        return run_layers(*arguments)

    monkeypatch.setattr(ModelRunner, "run_layers", look)
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 64}
    for chosen, expected in ((None, 1), ("2", 2)):
        if chosen is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", chosen)
        with LLM(reciter, **options) as llm:
            seen.clear()
            threads.append(2)
            llm.generate([[5] * 50], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert set(seen) == {expected} and threads[-1] == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    backend = TorchBackend()
    for num_parameters, expected in ((10_000_000, 1), (10_000_001, 2)):
        backend.choose_threads(num_parameters)
        with backend.with_threads():
            assert threads[-1] == expected


def test_threads_are_by_default_the_physical_cores_of_one_socket_among_those_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sockets of four cores, each of two hyperthreads: core i has the processors i and i + 8."""
    for cpu in range(16):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 8 // 4}\n")
        (topology / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    threads = [16]
    allowed = set(range(16))
    monkeypatch.setattr("nanovllm.utils.machine.CPUS", tmp_path)
    monkeypatch.setattr("nanovllm.utils.cgroups.OWN_CGROUPS", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.append(count))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for allowed, wanted in ((set(range(16)), 4), ({1, 2, 3, 4}, 3), ({0, 8}, 1), ({0, 4, 5, 6, 12}, 3)):  # noqa: B007
        threads.append(16)
        limit_threads()
        assert threads[-1] == wanted
    assert physical_cores() == 4, "of both: ranks of one engine share them"
    threads.append(2)
    limit_threads()
    assert threads[-1] == 2, "never more than torch has"
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    threads.append(16)
    limit_threads()
    assert threads[-1] == 16, "who says how many gets them"
