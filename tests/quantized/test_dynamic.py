"""Rounded inputs: the rules, and the tokens of an engine beside transformers with inputs rounded by hand.

They have a scale for each group with int8-dynamic, and for each token with w8a8.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.quantized import AWQ, CHECKPOINTS, FP8, GPTQ, GREEDY, PROMPTS, pack_gptq, run, save_quantised, save_rounded
from helpers.tiny import SMALL, edit_json, greedy, save_random
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from nanovllm import LLM
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.features.quantized.checkpoints import find_format
from nanovllm.features.quantized.codes import InputScales, quantize_int8
from nanovllm.features.quantized.dynamic import GROUP, multiply_rounded, multiply_rounded_tokens, round_inputs

DYNAMIC = {"quantization": "int8-dynamic"}
W8A8 = {"quantization": "w8a8"}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
"""A shape whose matrices two ranks cut between groups."""


# ---- the rule


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 300),
    seed=st.integers(0, 2**30),
    exponents=st.lists(st.integers(-140, 120), min_size=3, max_size=3),
    by_token=st.booleans(),
)
def test_each_group_is_rounded_to_its_own_127_steps(size: int, seed: int, exponents: list[int], by_token: bool) -> None:
    """Compared with a loop over single float32 numbers, each operation of which is rounded."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(size, dtype=np.float32)
    for group, exponent in enumerate(exponents):
        x[group * GROUP : (group + 1) * GROUP] *= np.float32(2.0**exponent)
    share = size if by_token else GROUP
    codes, scales = round_inputs(torch.from_numpy(x)[None], share)
    assert codes.shape == (1, -(-size // share), share) and codes.abs().max() <= 127
    for group in range(codes.shape[1]):
        values = x[group * share : (group + 1) * share]
        most = np.abs(values).max()
        is_tiny = most < np.float32(2.0**-100)
        inverse = np.float32(0) if is_tiny else np.float32(127) / most
        expected = [float(np.rint(value * inverse)) for value in values]
        assert codes[0, group].tolist() == expected + [0.0] * (share - len(expected))
        assert scales[0, group].item() == (0 if is_tiny else float(most / np.float32(127)))


def test_ties_go_to_even_codes() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    codes, scales = round_inputs(x)
    assert codes[0, 0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]
    assert scales.tolist() == [[1.0]]


@pytest.mark.parametrize(("multiply", "share"), [(multiply_rounded, GROUP), (multiply_rounded_tokens, None)])
def test_products_are_those_of_the_rounded_inputs(multiply: Callable[..., Tensor], share: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantize_int8(torch.randn(50, 300, generator=generator))
    x = torch.randn(9, 300, generator=generator)
    bias = torch.randn(50, generator=generator)
    found = multiply(x, weight.codes, weight.scales.values[:, 0], bias)
    expected = round_by_hand(x, share).double() @ weight.dequantize().double().T + bias
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    plain = x.double() @ weight.dequantize().double().T + bias
    assert (expected - plain).norm() < 0.01 * plain.norm()


def test_the_largest_sums_of_a_token_are_exact() -> None:
    """They need 27 bits, and float32 has 24."""
    codes = torch.full((2, 8192), 127, dtype=torch.int8)
    codes[0, -1] = 126
    y = multiply_rounded_tokens(torch.ones(1, 8192), codes, torch.ones(2), None)
    sums = torch.tensor([[8192 * 127**2 - 127, 8192 * 127**2]])
    assert torch.equal(y, sums.float() * (torch.ones(1) / torch.full((1,), 127.0)))


@pytest.mark.parametrize("multiply", [multiply_rounded, multiply_rounded_tokens])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_number_breaks_its_row_alone(broken: float, multiply: Callable[..., Tensor]) -> None:
    weight = quantize_int8(torch.randn(20, 300))
    x = torch.randn(3, 300)
    x[1, 200] = broken
    y = multiply(x, weight.codes, weight.scales.values[:, 0], None)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


# ---- the engine


def round_by_hand(x: Tensor, share: int | None = 128) -> Tensor:
    """Return the values that the codes of x [..., in] stand for, float32. So many inputs share a scale; None: all."""
    parts = []
    for part in x.float().split(share or x.shape[-1], -1):
        most = part.abs().amax(-1, keepdim=True)
        parts.append(torch.round(part * (127 / most)) * (most / 127))
    return torch.cat(parts, -1)


def run_by_hand(
    folder: Path, scratch: Path, model_class: type = Qwen3ForCausalLM, share: int | None = 128
) -> list[list[int]]:
    """The tokens of transformers with rounded weights, every linear layer and expert of which rounds its input."""
    return generate_by_hand(save_rounded(folder, scratch), model_class, share=share)


def generate_by_hand(
    rounded: Path, model_class: type, plain: tuple[str, ...] = (".gate",), share: int | None = 128
) -> list[list[int]]:
    """The tokens of transformers, every linear layer and expert of which rounds its input, but those of plain names."""

    def multiply_by_hand(x: Tensor, weight: Tensor) -> Tensor:
        return round_by_hand(x, share) @ weight.T

    model = model_class.from_pretrained(rounded, dtype=torch.float32, experts_implementation="eager").eval()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(plain):
            module.register_forward_pre_hook(lambda _, inputs: (round_by_hand(inputs[0], share),))
        if name.endswith(".experts"):
            module.forward = mock.patch.object(F, "linear", multiply_by_hand)(module.forward)
    return [greedy(model, prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    save_random(folder, **WIDE)
    return folder


@pytest.fixture(scope="module")
def expected(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return run_by_hand(wide, tmp_path_factory.mktemp("rounded") / "model")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_tokens_are_those_of_inputs_rounded_by_hand(wide: Path, expected: list[list[int]], backend: str) -> None:
    if backend == "cpu" and (reason := CpuBackend.why_cannot(torch.device("cpu"))):
        pytest.skip(reason)
    assert run(wide, attention_backend=backend, **DYNAMIC) == expected


def test_an_untied_head_and_biases_are_multiplied_so_too(tmp_path: Path) -> None:
    options = {"model_class": LlamaForCausalLM, "attention_bias": True, "tie_word_embeddings": False}
    save_random(tmp_path / "model", **options)
    expected = run_by_hand(tmp_path / "model", tmp_path / "rounded", LlamaForCausalLM)
    assert run(tmp_path / "model", **DYNAMIC) == expected


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    save_random(folder, model_class=Qwen3MoeForCausalLM, **sizes)
    return folder


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_w8a8_has_one_scale_for_each_token(wide: Path, mixture: Path, kind: str, tmp_path: Path) -> None:
    folder, model_class = {"dense": (wide, Qwen3ForCausalLM), "mixture": (mixture, Qwen3MoeForCausalLM)}[kind]
    expected = run_by_hand(folder, tmp_path / "rounded", model_class, share=None)
    assert run(folder, attention_backend="torch", **W8A8) == expected


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_experts_round_their_inputs_too(mixture: Path, tmp_path: Path, backend: str) -> None:
    if backend == "cpu" and (reason := CpuBackend.why_cannot(torch.device("cpu"))):
        pytest.skip(reason)
    expected = run_by_hand(mixture, tmp_path / "rounded", Qwen3MoeForCausalLM)
    assert run(mixture, attention_backend=backend, **DYNAMIC) == expected
    assert run(mixture, attention_backend=backend, quantization="int8") != expected


def test_ranks_that_cut_between_groups_give_the_tokens_of_one(
    wide: Path, expected: list[list[int]], local_ranks: None
) -> None:
    assert run(wide, tensor_parallel_size=2, **DYNAMIC) == expected


def test_ranks_that_cut_a_group_round_groups_of_their_own(local_ranks: None, tmp_path: Path) -> None:
    """The numbers are others, and about as good."""
    save_random(tmp_path)
    alone = run(tmp_path, **DYNAMIC)
    shared = run(tmp_path, tensor_parallel_size=2, **DYNAMIC)
    assert [tokens[0] for tokens in shared] == [tokens[0] for tokens in alone]


@pytest.mark.slow
def test_stages_of_a_pipeline_give_the_tokens_of_one(wide: Path, expected: list[list[int]]) -> None:
    """The stages are processes, as a user has them."""
    assert run(wide, pipeline_parallel_size=2, **DYNAMIC) == expected


def test_a_draft_model_rounds_its_inputs_too(wide: Path, expected: list[list[int]]) -> None:
    config = {"method": "draft_model", "model": str(wide), "num_speculative_tokens": 3}
    assert run(wide, speculative_config=config, **DYNAMIC) == expected


def test_new_weights_are_multiplied_so_too(wide: Path, expected: list[list[int]], tmp_path: Path) -> None:
    save_random(tmp_path / "old", seed=3, **WIDE)
    with LLM(str(tmp_path / "old"), **SMALL, device="cpu", **DYNAMIC) as llm:
        llm.load_weights(load_file(wide / "model.safetensors").items())
        assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected
        llm.sleep(1)
        llm.wake_up()
        assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected


# ---- what a user is told


def test_the_format_is_told_beside_results(wide: Path) -> None:
    from nanovllm.apps.jobs.provenance import read_provenance

    with LLM(str(wide), **SMALL, device="cpu", **DYNAMIC) as llm:
        assert read_provenance(llm.engine)["quantization"] == "int8-dynamic"


def test_a_gpu_is_estimated_without_its_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from nanovllm.apps.cli import main

    monkeypatch.setitem(sys.modules, "nanovllm.backends.gpu.triton_backend", None)
    assert main(["estimate", "qwen3-8b", "--gpu-memory", "24GB", "--quantization", "w8a8"]) == 0
    assert "w8a8" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["int8-dynamic", "w8a8"])
def test_checkpoints_of_floats_are_rounded(option: str) -> None:
    for config in (None, FP8):
        found = find_format(option, SimpleNamespace(quantization_config=config))
        assert found is not None and found.name == option and found.bits == 8 and found.quantizes_head
        assert (found.input_scales is InputScales.TOKEN) == (option == "w8a8")


@pytest.mark.parametrize(("dynamic", "count"), [(True, 0), (False, 1)])
def test_scales_of_activations_that_are_not_used_are_told_of(
    dynamic: bool, count: int, wide: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = save_quantised(wide, tmp_path, *CHECKPOINTS["int8 w8a8"])
    config = json.loads((quantised / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": dynamic}
    edit_json(quantised / "config.json", quantization_config=config)
    run(quantised, attention_backend="torch", **W8A8)
    assert caplog.text.count("scales of activations are not used: w8a8 computes others for each token") == count
    run(quantised)
    assert caplog.text.count("scales of activations") == count


def test_w8a8_takes_codes_of_a_byte_with_one_scale_a_row_alone() -> None:
    """int8-dynamic takes no codes: whoever has such codes is told of w8a8, others of products that are exact."""
    rows = GPTQ | {"bits": 8, "group_size": -1}
    for config in (CHECKPOINTS["int8 w8a8"][0], rows):
        found = find_format("w8a8", SimpleNamespace(quantization_config=config))
        assert found is not None and found.name == "w8a8" and found.input_scales is InputScales.TOKEN
        assert found.bits == 8 and not found.quantizes_head
        with pytest.raises(ValueError, match=r"'int8-dynamic'.* leave the option out, or use \"w8a8\" on a GPU"):
            find_format("int8-dynamic", SimpleNamespace(quantization_config=config))
    refused = {
        "codes of 4 bits, in groups of 32, with zeros": AWQ,
        "codes of 8 bits, in groups of 128": rows | {"group_size": 128},
        "codes of 8 bits, one scale a row, with zeros": rows | {"sym": False},
        "codes of 4 bits, one scale a row": rows | {"bits": 4},
    }
    for what, config in refused.items():
        for option, need in {
            "w8a8": "it must have codes of 8 bits without zeros",
            "int8-dynamic": "rounds weights",
        }.items():
            expected = rf"'{option}', and the checkpoint \(\w+\) has {what}; .*{need}.*: then products are exact"
            with pytest.raises(ValueError, match=expected):
                find_format(option, SimpleNamespace(quantization_config=config))
    with pytest.raises(ValueError, match="'int8', and the checkpoint is quantised already"):
        find_format("int8", SimpleNamespace(quantization_config=AWQ))


def test_zeros_that_no_configuration_tells_of_are_refused(wide: Path, tmp_path: Path) -> None:
    """The configuration says sym, and the words of zeros say something else."""
    config = GPTQ | {"bits": 8, "group_size": -1}
    quantised, _ = save_quantised(wide, tmp_path, config, lambda one: pack_gptq(one, one.shape[1], 8, symmetric=False))
    with pytest.raises(ValueError, match=r"layers.0.*_proj: its codes have zeros, which w8a8 does not take"):
        run(quantised, attention_backend="torch", **W8A8)


def test_the_c_kernels_refuse_w8a8(wide: Path) -> None:
    if reason := CpuBackend.why_cannot(torch.device("cpu")):
        pytest.skip(reason)
    with pytest.raises(ValueError, match=r"'w8a8': the C\+\+ kernels .* 128 of them, and not for a token: use \"int8-"):
        LLM(str(wide), **SMALL, attention_backend="cpu", **W8A8)


@pytest.mark.parametrize("model_class", [Qwen3ForCausalLM, Qwen3MoeForCausalLM])
def test_a_quantised_checkpoint_says_what_its_weights_say_with_inputs_rounded_by_hand(
    model_class: type, tmp_path: Path
) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    sizes = sizes if model_class is Qwen3MoeForCausalLM else {}
    save_random(tmp_path / "model", model_class=model_class, **WIDE, **sizes)
    quantised, means = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS["int8 w8a8"])
    # An input between two codes may be rounded to the other one, where sums differ by their order. Few tokens have few.
    found = [tokens[:4] for tokens in run(quantised, **W8A8)]
    by_hand = generate_by_hand(means, model_class, plain=(".gate", "lm_head"), share=None)
    assert found == [tokens[:4] for tokens in by_hand]
    options = SMALL | W8A8 | {"device": "cpu", "attention_backend": "torch"}
    message = r"checkpoint is quantised \(w8a8\); new weights are for"
    with LLM(str(quantised), **options) as llm, pytest.raises(RuntimeError, match=message):
        llm.load_weights([])


@pytest.mark.parametrize(("has_instruction", "count"), [(True, 0), (False, 1)])
def test_a_processor_without_the_instruction_is_told_once(
    wide: Path, has_instruction: bool, count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if reason := CpuBackend.why_cannot(torch.device("cpu")):
        pytest.skip(reason)
    from nanovllm.backends.cpu import dynamic as dynamic_cpu

    library = dynamic_cpu.dynamic_library()
    told = SimpleNamespace(call=library.call, multiplies_bytes=has_instruction)
    monkeypatch.setattr(dynamic_cpu, "dynamic_library", lambda: told)
    with LLM(str(wide), **SMALL, attention_backend="cpu", **DYNAMIC) as llm:
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert caplog.text.count("no instruction that multiplies bytes") == count


def test_plain_torch_says_that_it_is_slow(wide: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(wide, **DYNAMIC)
    assert "multiplies quantised weights slowly" in caplog.text
