"""GGUF's blocks as codes mean the float32 bits that the gguf package dequantises to."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.paths import ROOT

from nanovllm.features.gguf.blocks import BLOCK_TYPES, read_codes
from nanovllm.features.quantized.torch_matrix import TorchMatrix

gguf = pytest.importorskip("gguf")

FLOATS_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2)}
FLOATS_AT |= {"Q5_1": (0, 2), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""{type: where a block has numbers of float16}."""

EDGES = (0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 2.0**-24, -(2.0**-24), 2.0**-14)


def draw_blocks(type_name: str, count: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bytes, so that every pattern of scales comes. Their floats are random or `EDGES`."""
    rng = np.random.default_rng(seed)
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][1]
    blocks = rng.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    blocks[0] = 0
    blocks[1] = 255
    for at in FLOATS_AT[type_name]:
        values = rng.standard_normal(count) * 10.0 ** rng.integers(-6, 3, count)
        values[: len(EDGES)] = rng.permutation(EDGES)
        blocks[:, at : at + 2] = values.astype(np.float16)[:, None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("type_name", FLOATS_AT)
def test_codes_mean_the_bits_that_the_gguf_package_says(type_name: str) -> None:
    blocks = draw_blocks(type_name, 6 * 32)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[type_name]).reshape(48, -1)
    codes = read_codes(torch.from_numpy(blocks), type_name, 48)
    assert np.array_equal(codes.dequantize().numpy().view(np.int32), expected.view(np.int32))
    assert codes.in_features == 4 * BLOCK_TYPES[type_name].num_weights
    order = torch.randperm(48)
    assert np.array_equal(codes.take_rows(order).dequantize().numpy(), expected[order.numpy()])
    for ranks in (2, 4):
        length = codes.in_features // ranks
        parts = [codes.take_columns(slice(rank * length, (rank + 1) * length)) for rank in range(ranks)]
        assert np.array_equal(torch.cat([part.dequantize() for part in parts], 1).numpy(), expected)


def test_a_share_may_begin_within_the_groups_that_have_a_float_in_common() -> None:
    codes = read_codes(torch.from_numpy(draw_blocks("Q4_K", 12)), "Q4_K", 4)
    weights = codes.dequantize()
    for ranks in (3, 8, 24):
        length = 768 // ranks
        parts = [codes.take_columns(slice(rank * length, (rank + 1) * length)) for rank in range(ranks)]
        assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), weights)
    with pytest.raises(ValueError, match="into groups of 8, and the smallest possible are 16"):
        codes.take_columns(slice(24, 48))


@pytest.mark.parametrize(("num_bytes", "rows"), [(144 * 4 - 1, 4), (144 * 4, 3), (144, 0)])
def test_bytes_that_are_no_whole_rows_are_refused(num_bytes: int, rows: int) -> None:
    with pytest.raises(ValueError, match=f"{num_bytes} bytes are not {rows} rows of Q4_K's blocks of 144"):
        read_codes(torch.zeros(num_bytes, dtype=torch.uint8), "Q4_K", rows)


@pytest.mark.parametrize("type_name", FLOATS_AT)
def test_plain_torch_multiplies_them_as_the_weights_that_they_mean(type_name: str) -> None:
    codes = read_codes(torch.from_numpy(draw_blocks(type_name, 64)), type_name, 32)
    codes = replace(codes, scales=codes.scales.map(lambda values: values.clamp(-1, 1)))
    weights = codes.dequantize()
    x = torch.randn(5, weights.shape[1])
    matrix = TorchMatrix(codes, torch.float32)
    torch.testing.assert_close(matrix.multiply(x, None).double(), x.double() @ weights.double().T, rtol=1e-4, atol=1e-1)
    assert torch.equal(matrix.rows(torch.tensor([31, 0])), weights[[31, 0]])


def test_the_page_has_the_memory_of_each_type() -> None:
    from nanovllm.features.gguf.format import count_block_bytes

    types = (ROOT / "docs" / "gguf.md").read_text().partition("## Beside llama.cpp")[0]
    rows = [line.split("|") for line in types.splitlines() if line.startswith("| ")]
    told = {}
    for _, names, *bits, _, _, _ in (row for row in rows if len(row) == 7):
        listed = [name.strip() for name in names.split(",")]
        for i, name in enumerate(listed):
            told[name] = [column.split(",")[min(i, column.count(","))] for column in bits]
    for name, block in BLOCK_TYPES.items():
        sizes = (block.num_bytes, count_block_bytes(name))
        assert list(map(float, told[name])) == [
            pytest.approx(size * 8 / block.num_weights, abs=0.05) for size in sizes
        ], name
