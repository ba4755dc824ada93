"""Quantised checkpoints: the tokens of an engine whose checkpoint has the values that they mean."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.quantized import (
    AWQ,
    CHECKPOINTS,
    FP8,
    GPTQ,
    GREEDY,
    PACKED,
    PLAIN,
    PROMPTS,
    group,
    pack_compressed,
    pack_fp8,
    pack_rows,
    run,
    save_quantised,
    scheme,
)
from helpers.tiny import SMALL, edit_json, save_random
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, Qwen2ForCausalLM, Qwen3MoeForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks.evidence.bench_loading import AT_LOAD, measure
from benchmarks.random_checkpoint import write_random_checkpoint
from nanovllm import LLM
from nanovllm.backends.cpu.quantized import quantized_library
from nanovllm.features.quantized.checkpoints import find_format
from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.formats import INT8, MADE_AT_LOAD, Format
from nanovllm.features.quantized.loading import count_bytes
from nanovllm.features.quantized.unpack import Floats4, find_order
from nanovllm.models.sizes import Sizes

GOLDEN = Path(__file__).parent / "golden"
CODED = [name for name in CHECKPOINTS if not name.startswith("fp8")]
OPTIONS = SMALL | {"device": "cpu", "attention_backend": "torch"}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES = {
    "biases": {"model_class": Qwen2ForCausalLM, "head_dim": ..., "num_attention_heads": 2, "num_key_value_heads": 1},
    "experts": {"model_class": Qwen3MoeForCausalLM, **MOE},
}


def read(config: dict[str, object]) -> Format:
    found = find_format(None, PretrainedConfig(quantization_config=config))
    assert found is not None
    return found


GOLDEN_FORMATS = {
    "awq": CHECKPOINTS["awq"][0],
    "gptq_4": CHECKPOINTS["gptq"][0],
    "gptq_8": CHECKPOINTS["gptq 8 bits"][0],
    "gptq_v2_desc_act": CHECKPOINTS["gptq_v2"][0],
    "pack_4": CHECKPOINTS["packed"][0],
    "pack_4_zeros": CHECKPOINTS["packed with zeros"][0],
    "pack_8": CHECKPOINTS["packed 8 bits"][0],
    "int_8": CHECKPOINTS["int8 w8a8"][0],
    "float_8": CHECKPOINTS["fp8 rows"][0],
    "float_8_block": CHECKPOINTS["fp8 rows"][0]
    | scheme(type="float", num_bits=8, strategy="block", block_structure=[16, 32]),
}


@pytest.mark.parametrize("name", GOLDEN_FORMATS)
def test_a_file_of_the_library_means_what_the_library_says(name: str) -> None:
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    expected = tensors.pop("dequantized")
    out, size = expected.shape
    format = read(GOLDEN_FORMATS[name])
    names = {f"x.{suffix}" for suffix in tensors}
    assert format.find_tensors("x", names, out, size).keys() == tensors.keys()
    for suffix, (shape, _) in format.find_tensors("x", names, out, size).items():
        assert tuple(tensors[suffix].shape) == shape
    converted = format.convert(tensors, out, size)
    weights = converted.dequantize() if isinstance(converted, Codes) else converted[:, :]
    assert torch.allclose(weights, expected, rtol=2e-3, atol=1e-6)  # the libraries multiply in float16 or bfloat16


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from((4, 8)),
    st.sampled_from((8, 16)),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_what_loops_pack_is_unpacked(
    seed: int, bits: int, out: int, num_groups: int, symmetric: bool, shuffle: bool
) -> None:
    size = 16
    weight = torch.randn(out, size * num_groups, generator=torch.Generator().manual_seed(seed))
    made = group(weight, bits, size, symmetric, shuffle)
    scales = made.scales.T
    words = pack_rows(made.numbers.T.reshape(-1, 32 // bits, out).transpose(1, 2).flatten(0, 1), bits).view(-1, out)
    for is_v1 in (True, False):
        zeros = pack_rows(made.zeros.T - int(is_v1), bits)
        tensors = {"qweight": words, "qzeros": zeros, "scales": scales, "g_idx": made.groups}
        layout = "gptq" if is_v1 else "gptq_v2"
        config = GPTQ | {"bits": bits, "group_size": size, "checkpoint_format": layout}
        codes = read(config).convert(tensors, *weight.shape)
        assert torch.equal(codes.dequantize(), made.mean())
        assert (codes.order is None) == (find_order(made.groups, size) is None)
    packed = pack_rows(made.numbers, bits)
    packed_zeros = pack_rows(made.zeros.T, bits).T
    tensors = {"weight_packed": packed, "weight_scale": made.scales, "weight_g_idx": made.groups}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    with_zeros = tensors | {"weight_zero_point": packed_zeros}
    for stored in (with_zeros, tensors) if symmetric else (with_zeros,):
        settings = scheme(num_bits=bits, group_size=size, symmetric="weight_zero_point" not in stored, actorder="group")
        codes = read(CHECKPOINTS["packed"][0] | settings).convert(stored, *weight.shape)
        assert torch.equal(codes.dequantize(), made.mean())
    if bits == 4 and not shuffle:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        words = pack_rows(made.numbers.T, 4, order)
        tensors = {"qweight": words, "qzeros": pack_rows(made.zeros.T, 4, order), "scales": scales}
        codes = read(CHECKPOINTS["awq"][0] | {"group_size": size}).convert(tensors, *weight.shape)
        assert torch.equal(codes.dequantize(), made.mean())


def test_every_spelling_of_an_order_of_columns_says_whether_the_checkpoint_has_one() -> None:
    """compressed-tensors saves weight_g_idx for "group" and its other name "dynamic", and not for "weight"."""
    for spelling, has_order in (
        *(("group", True), ("dynamic", True), (True, True)),
        *(("weight", False), ("static", False), (False, False), (None, False)),
    ):
        config = scheme(num_bits=4, strategy="group", group_size=32, symmetric=True, actorder=spelling)
        found = read(CHECKPOINTS["packed"][0] | config).list_tensors("x", (), 64, 64)
        assert ("weight_g_idx" in found) == has_order


def test_zeros_of_gptq_that_borrowed_are_whole_again() -> None:
    """A zero of 0 is stored as -1, which takes one from its neighbour's bits. Adding to the word gives it back."""
    zeros = torch.tensor([[0, 3, 0, 0, 15, 1, 0, 8]])
    word = sum((int(zero) - 1) << 4 * i for i, zero in enumerate(zeros[0])) % 2**32
    qzeros = torch.tensor([[word - 2**32 if word >= 2**31 else word]], dtype=torch.int32)
    tensors = {"qweight": torch.zeros(1, 8, dtype=torch.int32), "qzeros": qzeros, "scales": torch.ones(1, 8)}
    codes = read(GPTQ | {"group_size": 8}).convert(tensors, 8, 8)
    assert codes.zeros is not None
    assert codes.zeros.flatten().tolist() == zeros[0].tolist()


def test_groups_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="g_idx has groups of other sizes than 4"):
        find_order(torch.tensor([0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.int32), 4)


@pytest.fixture(params=["torch", "cpu"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The backend that multiplies quantised weights; the oracle is always plain torch."""
    name: str = request.param
    if name == "cpu":
        try:
            quantized_library()
        except RuntimeError as error:
            pytest.skip(str(error))
    return name


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tokens_are_those_of_the_unpacked_weights(name: str, kernels: str, tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    quantised, means = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS[name])
    expected = run(means)
    assert run(quantised, attention_backend=kernels) == expected
    assert run(tmp_path / "model") != expected, "the test would not notice other weights"


@pytest.mark.parametrize("name", ["awq", "gptq desc_act", "packed with zeros", "fp8 blocks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(name: str, family: str, kernels: str, tmp_path: Path) -> None:
    save_random(tmp_path / "model", tie_word_embeddings=False, **FAMILIES[family])
    quantised, means = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS[name])
    assert run(quantised, attention_backend=kernels) == run(means)


@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_matrices_that_are_not_quantised_may_stand_beside_some_that_are(
    family: str | None, kernels: str, tmp_path: Path
) -> None:
    save_random(tmp_path / "model", **({} if family is None else FAMILIES[family]))
    plain = (*PLAIN, "k_proj", "up_proj", "layers.0.self_attn.o_proj")
    quantised, means = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS["awq"], plain=plain)
    assert run(quantised, attention_backend=kernels) == run(means)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("kernels", ["cpu"], indirect=True)
def test_ranks_and_stages(name: str, kernels: str, local_ranks: None, tmp_path: Path) -> None:
    save_random(tmp_path / "model", intermediate_size=128)
    quantised, means = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS[name])
    expected = run(means)
    assert run(quantised, attention_backend=kernels, pipeline_parallel_size=2) == expected
    if name != "gptq desc_act":  # refused: see test_ranks_that_cannot_share_are_refused_by_name
        assert run(quantised, attention_backend=kernels, tensor_parallel_size=2) == expected


@pytest.mark.slow
def test_ranks_that_cut_groups_keep_the_groups_scales(tmp_path: Path) -> None:
    """The ranks are processes, as a user has them."""
    save_random(tmp_path / "model", intermediate_size=192)
    config, _ = CHECKPOINTS["packed with zeros"]
    wide = config | scheme(num_bits=4, strategy="group", group_size=64, symmetric=False)
    quantised, means = save_quantised(
        tmp_path / "model", tmp_path, wide, lambda weight: pack_compressed(weight, 64, symmetric=False)
    )
    assert run(quantised, tensor_parallel_size=2) == run(means)


def test_ranks_that_cannot_share_are_refused_by_name(tmp_path: Path) -> None:
    for name, sizes, message in (
        ("packed", 112, "down_proj: ranks with 56 columns each cut its groups of 32 into groups of 8"),
        ("gptq desc_act", 128, "its columns are in an order of their own"),
    ):
        save_random(tmp_path / name, intermediate_size=sizes)
        quantised, _ = save_quantised(tmp_path / name, tmp_path / f"{name} made", *CHECKPOINTS[name])
        with pytest.raises(ValueError, match=message):
            LLM(str(quantised), tensor_parallel_size=2, **OPTIONS)


@pytest.fixture(scope="module")
def write_large(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the checkpoint of a model that is large beside 128 MB, once in each format, and returns its folder."""
    from nanovllm.features.shapes import preset_config

    config = preset_config("qwen3-0.6b") | {"num_hidden_layers": 10, "vocab_size": 4096, "intermediate_size": 4096}

    @cache
    def write(stored: str) -> Path:
        folder = tmp_path_factory.mktemp("large")
        write_random_checkpoint(config, stored, folder)
        return folder

    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int8-dynamic", "awq", "w8a8"])
def test_loading_never_holds_the_model_in_16_bits(name: str, write_large: Callable[[str], Path]) -> None:
    """The most anonymous memory is the quantised size, twice the largest matrix, and 128 MB.

    Codes are made of floats, unpacked from words, or taken as they are.
    """
    from nanovllm.apps.estimate import fetch_config

    folder = write_large("bfloat16" if name in AT_LOAD else name)
    hf_config = fetch_config(str(folder))
    format = find_format(name if name in AT_LOAD else None, hf_config)
    assert format is not None
    sizes = Sizes(hf_config)
    limit = count_bytes(sizes.model, format, 2) + 2 * (2 * hf_config.hidden_size * 2 * 4096) + 128 * 10**6
    assert limit < 2 * sizes.num_parameters, "the test would not notice a copy in bfloat16"
    assert measure(folder, "auto", name)["most"] < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp4_means_the_bits_that_transformers_says(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(2 * 255).view(2, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(16).repeat(2).view(2, 255, 16)  # 255 is no number
    floats = Floats4(blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    everything = slice(None)
    for expert in (0, 1):
        found = floats[expert, everything, everything].to(dtype)
        assert torch.equal(found, expected[expert])
        assert torch.equal(found.signbit(), expected[expert].signbit())
    assert torch.equal(floats[1, slice(32, 64), slice(1, 3)].to(dtype), expected[1, 32:64, 1:3])


@pytest.mark.parametrize("option", MADE_AT_LOAD)
def test_fp8_becomes_int8_if_asked(option: str, kernels: str, tmp_path: Path) -> None:
    """The engine is that of a checkpoint with the values that the floats mean, to the bit. So are dummy weights."""
    if (option, kernels) == ("w8a8", "cpu"):
        pytest.skip("the C++ kernels refuse w8a8")
    save_random(tmp_path / "model")
    quantised, means = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS["fp8 blocks"])
    options = OPTIONS | {"attention_backend": kernels, "quantization": option}

    def find_weights(folder: Path, load_format: str) -> torch.Tensor:
        with LLM(str(folder), load_format=load_format, **options) as llm:
            return llm.engine.runner.model.layers[0].mlp.down_proj.packed.rows(torch.arange(64))

    assert run(quantised, **options) == run(means, **options)
    for load_format in ("auto", "dummy"):
        assert torch.equal(find_weights(quantised, load_format), find_weights(means, load_format))


def test_fp8_says_what_memory_it_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_random(tmp_path / "model")
    quantised, _ = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS["fp8 blocks"])
    with LLM(str(quantised), **OPTIONS):
        pass
    assert "weights of 8 bits (fp8) become float32 while they are read, and take" in caplog.text


def pack_fp8_matrix(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors, means = pack_fp8(weight, *weight.shape, "_scale")
    return tensors | {"weight_scale": tensors["weight_scale"].view(1)}, means


def test_fp8_with_one_scale_a_matrix_means_what_its_tensors_say(tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    quantised, means = save_quantised(tmp_path / "model", tmp_path, config, pack_fp8_matrix)
    assert run(quantised) == run(means)


def test_layers_that_are_not_quantised_stay_as_they_are(tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    config, pack = CHECKPOINTS["awq"]
    dense = [0]

    def pack_most(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if weight.shape[0] == 64 and weight.shape[1] == 128:  # o_proj
            dense[0] += 1
            return {"weight": weight}, weight
        return pack(weight)

    quantised, means = save_quantised(tmp_path / "model", tmp_path, config, pack_most)
    assert dense[0] == 2
    assert run(quantised) == run(means)


def test_who_sleeps_wakes_up_quantised(tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    quantised, _ = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS["awq"])
    with LLM(str(quantised), **OPTIONS) as llm:
        before = [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        llm.sleep(2)
        llm.wake_up()
        assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == before
        with pytest.raises(RuntimeError, match=r"checkpoint is quantised \(awq\); new weights are for engines without"):
            llm.load_weights(load_file(tmp_path / "model" / "model.safetensors").items())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_dummy_weights_need_config_json_alone(name: str, tmp_path: Path) -> None:
    save_random(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=CHECKPOINTS[name][0])
    (tmp_path / "model.safetensors").unlink()
    with LLM(str(tmp_path), load_format="dummy", **OPTIONS) as llm:
        assert [len(output["token_ids"]) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == [16] * 4
        assert (llm.engine.runner.model.layers[0].mlp.down_proj.packed is None) == (name not in CODED)


DAMAGE = {
    "lacks": (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.qzeros"), "lacks 1 tensors: .*up_proj.qzeros"),
    "left over": (
        lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.g_idx": torch.zeros(64)}),
        "has 1 tensors that the model does not: .*up_proj.g_idx",
    ),
    "misshapen": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.scales": torch.zeros(3, 64)}),
        r"o_proj.scales has shape \[3, 64\]; config.json asks for \[4, 64\]",
    ),
    "another type": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.qzeros": torch.zeros(4, 8)}),
        "o_proj.qzeros is F32; config.json asks for one of I32",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_tensor_that_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    quantised, _ = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS["awq"])
    change, message = DAMAGE[name]
    tensors = load_file(quantised / "model.safetensors")
    change(tensors)
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        LLM(str(quantised), **OPTIONS)


def test_a_shape_that_contradicts_config_json_is_named(tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    quantised, _ = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS["packed"])
    tensors = load_file(quantised / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight_shape"] = torch.tensor([64, 88])
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj: weight_shape is \[64, 88\]"):
        LLM(str(quantised), **OPTIONS)


INTEGERS = PACKED | {"format": "int-quantized"}
FLOATS = PACKED | {"format": "float-quantized"}
REFUSED = (
    ("bits is 3", GPTQ | {"bits": 3}),
    ("checkpoint_format is 'marlin'", GPTQ | {"checkpoint_format": "marlin"}),
    ("pack_dtype is 'int64'", GPTQ | {"pack_dtype": "int64"}),
    ("is_marlin_format is True", GPTQ | {"is_marlin_format": True}),
    ("dynamic has", GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 8}}}),
    ("bits is 8", AWQ | {"bits": 8}),
    ("w_bit is 3", AWQ | {"w_bit": 3}),
    ("version is 'gemv'", AWQ | {"version": "gemv"}),
    ("group_size is 'x'", AWQ | {"group_size": "x"}),
    ("group_size is 7", AWQ | {"group_size": 7}),
    ("format is 'nvfp4-pack-quantized'", PACKED | {"format": "nvfp4-pack-quantized"} | scheme(num_bits=4)),
    ("type is 'complex'", PACKED | scheme(type="complex", num_bits=4)),
    ("num_bits is 3", PACKED | scheme(num_bits=3)),
    ("num_bits is 4", INTEGERS | scheme(num_bits=4)),
    ("num_bits is 4", FLOATS | scheme(type="float", num_bits=4)),
    ("format is 'pack-quantized'", PACKED | scheme(type="float", num_bits=8)),
    ("strategy is 'tensor'", PACKED | scheme(num_bits=4, strategy="tensor")),
    ("strategy is 'block'", INTEGERS | scheme(num_bits=8, strategy="block")),
    ("strategy is 'group'", FLOATS | scheme(type="float", num_bits=8, strategy="group", group_size=32)),
    ("actorder is 'sideways'", PACKED | scheme(num_bits=4, actorder="sideways")),
    ("transform_config", PACKED | scheme(num_bits=4) | {"transform_config": {"config_groups": {}}}),
    ("config_groups must have", {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    ("fmt is 'e5m2'", FP8 | {"fmt": "e5m2"}),
    ("quant_algo is 'NVFP4'", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    ("the size of a block is", FP8 | {"weight_block_size": 128}),
)
"""The beginning of what is said, and a configuration with one setting that is not read."""


HOSTILE = (
    *(5, "awq", [1], {"quant_method": ["awq"]}, {"quant_method": None}, {"quant_method": "gptq", "bits": [4]}),
    *(GPTQ | {"dynamic": [1]}, GPTQ | {"group_size": {}}, GPTQ | {"group_size": True}, GPTQ | {"group_size": 10**400}),
    *(CHECKPOINTS["packed"][0] | {"config_groups": value} for value in ([1], {"a": 1}, {"a": {"weights": 1}}, 7)),
    *(CHECKPOINTS["packed"][0] | {"sparsity_config": value} for value in ([1], 3, {"format": "sparse-24-bitmask"})),
    *(CHECKPOINTS["packed"][0] | scheme(num_bits=value, strategy="channel") for value in ([], "4", None)),
    CHECKPOINTS["packed"][0] | scheme(num_bits=4, strategy=["group"]),
    *(CHECKPOINTS["fp8 blocks"][0] | {"weight_block_size": value} for value in ([1], [0, 1], ["a", "b"], [1, 2, 3])),
)


@pytest.mark.parametrize("config", HOSTILE, ids=lambda config: str(config)[:60])
def test_a_configuration_that_makes_no_sense_is_a_value_error(config: object) -> None:
    with pytest.raises(ValueError, match=r"config.json"):
        read(config)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["awq", "packed with zeros", "int8", "int8 w8a8"])
def test_the_memory_of_the_weights_is_counted_to_the_byte(name: str, tmp_path: Path) -> None:
    save_random(tmp_path)
    if name != "int8":
        edit_json(tmp_path / "config.json", quantization_config=CHECKPOINTS[name][0])
    else:
        edit_json(tmp_path / "config.json", architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **MOE)
    quantization = "int8" if name == "int8" else None
    with LLM(str(tmp_path), load_format="dummy", quantization=quantization, **OPTIONS) as llm:
        runner = llm.engine.runner
        found = sum(parameter.nbytes for parameter in runner.model.parameters())
        forms = {id(module.packed): module.packed for module in runner.model.modules() if hasattr(module, "packed")}
        for form in forms.values():
            for packed in form if isinstance(form, tuple) else [form]:
                found += sum(tensor.nbytes for tensor in packed._codes.list_tensors()) if packed is not None else 0
        format = runner.quantizer.format
        zeros = 0
        if format.has_zeros:  # dummy weights have none
            model = runner.sizes.model
            zeros = count_bytes(model, format, 4) - count_bytes(model, replace(format, has_zeros=False), 4)
        assert runner.sizes.weight_bytes(runner.dtype, runner.quantizer) - zeros == found


@pytest.mark.parametrize(("message", "config"), REFUSED)
def test_what_is_not_read_is_refused_by_name(message: str, config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"quantization_config of .*: {message}"):
        read(config)


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (AWQ | {"group_size": 128}, "4 bits (awq, groups of 128), embeddings in float16"),
        (GPTQ | {"bits": 8, "group_size": -1}, "8 bits (gptq, rows), embeddings in float16"),
        (INTEGERS | scheme(num_bits=8), "8 bits (compressed-tensors, rows), embeddings in float16"),
        (FP8, "float16, from fp8 with 8 bits"),
        ({"quant_method": "mxfp4"}, "float16, from mxfp4 with 4 bits"),
    ],
)
def test_a_table_tells_how_the_weights_are_stored(config: dict[str, object], stored: str) -> None:
    assert read(config).describe("float16") == stored
    assert INT8.describe("float16") == "int8"


def test_the_option_must_agree_with_the_checkpoint(tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", quantization_config=CHECKPOINTS["awq"][0])
    for option in ("awq", "awq_marlin", None):
        LLM(str(tmp_path / "model"), quantization=option, load_format="dummy", **OPTIONS).exit()
    with pytest.raises(ValueError, match=r"is 'gptq', and the checkpoint is quantised already \(awq\)"):
        LLM(str(tmp_path / "model"), quantization="gptq_marlin", **OPTIONS)
    with pytest.raises(ValueError, match=r"'int8', and the checkpoint is quantised already \(awq\): leave"):
        LLM(str(tmp_path / "model"), quantization="int8", **OPTIONS)
    with pytest.raises(ValueError, match="lora is 'folder', and the checkpoint is quantised already"):
        LLM(str(tmp_path / "model"), lora="folder", **OPTIONS)
