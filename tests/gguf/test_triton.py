"""The Triton kernels multiply GGUF's blocks as they are: in the interpreter, or on a GPU where there is one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.gguf_models import draw_matrix, save_gguf
from helpers.kernel_cases import DEVICE, HALF, poisoned_memory, randn
from helpers.tiny import SMALL, draw_prompts

from nanovllm import LLM, SamplingParams
from nanovllm.features.gguf.blocks import BLOCK_TYPES, read_codes
from nanovllm.features.quantized.codes import Codes

pytest.importorskip("gguf")
pytest.importorskip("triton")

from nanovllm.backends.gpu.product import CODES_TILES
from nanovllm.backends.gpu.quantized import TritonMatrix
from nanovllm.backends.gpu.startup import keep_one_layer_of_each_kind, list_packed
from nanovllm.runner.model_runner import ModelRunner

OUT = 40
IN = 256


def draw_codes(type_name: str, rows: int = OUT, seed: int = 0) -> Codes:
    """Return a matrix of random blocks, whose weights are about 0.3."""
    data = draw_matrix(type_name, np.zeros((rows, IN), np.float32), np.random.default_rng(seed), size=0.3)
    return read_codes(torch.from_numpy(data).to(DEVICE), type_name, rows)


def assert_products(found: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
    """Equal but for rounding: sums in float32 of 256 products, in another order than these in float64."""
    eps = torch.finfo(found.dtype).eps
    expected = (x.double() @ weights.double().T).float()
    torch.testing.assert_close(found.float(), expected, rtol=2 * eps, atol=2 * eps + 1e-4)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_products_and_rows_of_each_type_are_those_of_its_weights(type_name: str) -> None:
    """Of many rows the weights are rounded to the type of the inputs first; of few rows they never are."""
    codes = draw_codes(type_name)
    weights = codes.dequantize()
    indices = torch.tensor([OUT - 1, 0, 0], device=DEVICE)
    others = (HALF, torch.bfloat16) if DEVICE.type == "cuda" else (HALF,)
    for dtype in (torch.float32, *others):
        matrix = TritonMatrix(codes, dtype)
        assert torch.equal(matrix.rows(indices), weights[indices].to(dtype))
        for num_rows in (1, 17, 65, 200) if dtype.itemsize == 2 else (17, 130):
            x = randn(num_rows, IN, dtype=dtype, seed=num_rows)
            means = weights.to(dtype) if num_rows > 128 else weights
            with poisoned_memory():
                assert_products(matrix.multiply(x, None), x, means)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q2_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_products_of_ranks_shares_add_up_to_the_whole(type_name: str, ranks: int) -> None:
    """A share has 128 inputs, a group of 32, or one of 16."""
    codes = draw_codes(type_name)
    x = randn(3, IN)
    length = IN // ranks
    shares = [slice(i * length, (i + 1) * length) for i in range(ranks)]
    found = sum(TritonMatrix(codes.take_columns(share), torch.float32).multiply(x[:, share], None) for share in shares)
    assert isinstance(found, torch.Tensor)
    assert_products(found, x, codes.dequantize())


@pytest.mark.parametrize("type_name", ["Q2_K", "Q3_K", "Q6_K"])
@pytest.mark.parametrize("num_rows", [3, 130])
def test_rows_may_end_within_a_step_of_two_groups(type_name: str, num_rows: int) -> None:
    """The group that is not there is not read: the values behind the matrix are NaN."""
    codes = draw_codes(type_name).take_columns(slice(0, 48))
    x = randn(num_rows, 48)
    with poisoned_memory():
        assert_products(TritonMatrix(codes, torch.float32).multiply(x, None), x, codes.dequantize())


@pytest.mark.parametrize("type_name", ["Q4_K", "Q5_1", "Q6_K", "Q2_K", "IQ4_NL"])
@pytest.mark.parametrize(
    ("num_tokens", "gather"), [(1, True), (40, False), pytest.param(140, True, marks=pytest.mark.slow)]
)
def test_products_of_experts_are_those_of_their_weights(type_name: str, num_tokens: int, gather: bool) -> None:
    from nanovllm.features.families.qwen3_moe.ops import grouped_linear_reference, route_reference

    parts = [draw_codes(type_name, 40, seed) for seed in range(3)]
    tensors = [torch.stack(same) for same in zip(*(part.list_tensors() for part in parts), strict=True)]
    stacked = iter(tensors)
    codes = parts[0].map(lambda _: next(stacked))
    routing = route_reference(randn(num_tokens, 3, seed=3), 2, True, torch.arange(num_tokens, device=DEVICE))
    x = randn(num_tokens if gather else num_tokens * 2, IN)
    expected = grouped_linear_reference(x, codes.dequantize(), routing, gather)
    found = TritonMatrix(codes, torch.float32).multiply_pairs(x, routing, gather)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-4)


def test_at_start_up_all_variants_of_the_kernel_are_compiled(tmp_path: Path) -> None:
    """Layers that are alike but for the types of their matrices launch other kernels. So do unlike neighbours."""
    kinds = {"blk.1.ffn_down": "Q6_K", "blk.1.attn_v": "Q6_K", "token_embd": "F16"}
    path = tmp_path / "model.gguf"
    save_gguf(
        path, types=lambda name: next((kinds[part] for part in kinds if part in name), "Q4_K"), num_hidden_layers=3
    )
    with LLM(path, **SMALL | {"device": DEVICE.type, "attention_backend": "triton", "enforce_eager": True}) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        layers = list(runner.model.layers)
        with keep_one_layer_of_each_kind(runner.model):
            assert list(runner.model.layers) == layers[1:]
        limits = [matrix.row_limits for module in layers[1].modules() for matrix in list_packed(module)]
    assert limits == [tuple(most for most, _ in CODES_TILES)] * 5, "q and k beside v, o, gate and up, down"


def say(path: Path, backend: str) -> list[list[int]]:
    """Return two tokens of two greedy requests. Their prompts share a step."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    options = SMALL | {"device": DEVICE.type, "attention_backend": backend}
    with LLM(path, **options) as llm:
        return [output["token_ids"] for output in llm.generate(draw_prompts([5, 14]), params, use_tqdm=False)]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3moe"])
def test_tokens_on_triton_are_those_on_torch(tmp_path: Path, architecture: str) -> None:
    """q and k have 4 bits, v and the embedding 6; gate and up differ, too, also those of experts."""
    kinds = {"attn_v": "Q6_K", "token_embd": "Q6_K", "ffn_down": "Q3_K", "ffn_up": "IQ4_XS", "attn_output": "Q5_0"}

    def choose(name: str) -> str:
        return "F32" if "gate_inp" in name else next((kinds[part] for part in kinds if part in name), "Q4_K")

    path = tmp_path / "model.gguf"
    save_gguf(path, architecture, choose, num_hidden_layers=1)
    assert say(path, "triton") == say(path, "torch")
