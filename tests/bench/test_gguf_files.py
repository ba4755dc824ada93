"""benchmarks/gguf_files.py: its files say what the built-in model says, rounded by the gguf package; and the pairs."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.bench_quality import make_files
from benchmarks.evidence.bench_loglikelihoods import NUM_CHOICES, Timing, count_right, make_pairs, summarize
from benchmarks.gguf_files import count_bytes, fill_up, load_built_in, quantize_with_package, write_source

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


def test_the_filled_up_model_says_what_the_built_in_one_says() -> None:
    """In float32, with other sums: logits of about 20 differ by some 1e-5."""
    model = load_built_in()
    filled = fill_up(model)
    ids = torch.randint(0, 660, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, filled(ids).logits, atol=1e-4)
    rows = {parameter.shape[1] for parameter in filled.parameters() if parameter.dim() == 2}
    assert all(size % 256 == 0 for size in rows)


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q5_1", "Q8_0"])
def test_the_package_rounds_the_matrices_and_changes_nothing_else(source: Path, tmp_path: Path, kind: str) -> None:
    quantize_with_package(source, tmp_path / "m.gguf", kind)
    before = gguf.GGUFReader(source)
    after = gguf.GGUFReader(tmp_path / "m.gguf")
    keys = [name for name in before.fields if not name.startswith("GGUF.")]
    assert [after.fields[name].contents() for name in keys] == [before.fields[name].contents() for name in keys]
    chosen = gguf.GGMLQuantizationType[kind]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        values = gguf.dequantize(old.data, old.tensor_type)
        wanted = gguf.quantize(values, chosen) if values.ndim > 1 else values
        assert (old.name, list(old.shape)) == (new.name, list(new.shape))
        assert np.array_equal(new.data.view(np.uint8), wanted.view(np.uint8))
    num_bytes, num_weights = count_bytes(tmp_path / "m.gguf")
    assert num_weights == sum(parameter.numel() for parameter in fill_up(load_built_in()).parameters())
    size = 32 if kind == "F32" else 8 * gguf.GGML_QUANT_SIZES[chosen][1] / gguf.GGML_QUANT_SIZES[chosen][0]
    assert 8 * num_bytes / num_weights == pytest.approx(size, rel=0.01)


def test_a_type_that_the_package_cannot_make_is_named(source: Path) -> None:
    files, refused = make_files(source, ["BF16", "Q8_0", "Q2_K", "Q4_K_M", "IQ4_XS", "Q9"], None)
    assert list(files) == ["BF16", "Q8_0, by the gguf package"]
    assert list(refused) == ["Q2_K", "Q4_K_M", "IQ4_XS", "Q9"]
    assert all(f"does not quantise to {kind}: give --llama-cpp-python" in told for kind, told in refused.items())


def test_each_question_has_one_right_answer_and_no_context_ends_with_a_space() -> None:
    pairs = make_pairs(40)
    assert len(pairs) == 40
    assert all(pair.context == pair.context.strip() and pair.continuation[0] == " " for pair in pairs)
    for first in range(0, 40, NUM_CHOICES):
        choices = pairs[first : first + NUM_CHOICES]
        assert len({pair.context for pair in choices}) == 1
        assert len(set(choices)) == NUM_CHOICES
        sums = [eval(pair.continuation.replace("=", "==")) for pair in choices]
        assert sum(sums) == 1


def test_times_are_those_of_1000_pairs_and_right_answers_are_counted() -> None:
    pairs = make_pairs(8)
    rng = random.Random(0)
    perfect = [float(eval(pair.continuation.replace("=", "=="))) - rng.random() / 2 for pair in pairs]
    assert count_right(pairs, perfect) == 1
    assert count_right(pairs, [-value for value in perfect]) == 0
    line = summarize("server", pairs, Timing(1.5, 2.0, perfect[:4]), [value + 0.25 for value in perfect])
    assert (line["seconds"], line["processor seconds"], line["measured"]) == (375.0, 500.0, 4)
    assert (line["mean distance"], line["largest"], line["right"]) == (0.25, 0.25, 1)
