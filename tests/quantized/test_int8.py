"""int8 at load: the tokens of an engine whose checkpoint has the rounded values, however the weights come."""

import json
from pathlib import Path

import pytest
import torch
from helpers.hybrids import TINY_HYBRID
from helpers.quantized import GREEDY, PROMPTS, run, save_rounded
from helpers.tiny import SMALL, edit_json, save_random
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3_5ForCausalLM, Qwen3MoeForCausalLM

from nanovllm import LLM
from nanovllm.features.quantized.codes import quantize_int8
from nanovllm.models.layers.linear import MatrixModule

MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 2,
    "norm_topk_prob": True,
}
FAMILIES = {
    "qwen3": {},
    "untied": {"tie_word_embeddings": False},
    "qwen2": {"model_class": Qwen2ForCausalLM, "head_dim": ...},
    "llama": {"model_class": LlamaForCausalLM, "attention_bias": True},
    "moe": {"model_class": Qwen3MoeForCausalLM, **MOE},
    "qwen3_5": {"model_class": Qwen3_5ForCausalLM, **TINY_HYBRID},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_random(folder, **FAMILIES[request.param])
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_random(folder)
    return folder


@pytest.fixture(scope="module")
def expected(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return run(save_rounded(tiny, tmp_path_factory.mktemp("rounded") / "model"))


def test_tokens_are_those_of_the_rounded_weights(folder: Path, tmp_path: Path) -> None:
    expected = run(save_rounded(folder, tmp_path / "rounded"))
    assert run(folder, quantization="int8") == expected


def test_no_matrix_is_left_in_the_model(folder: Path) -> None:
    from nanovllm.features.families.qwen3_moe.decoder import Experts

    with LLM(str(folder), quantization="int8", **SMALL | {"device": "cpu"}) as llm:
        model = llm.engine.runner.model
        assert llm.engine.config.quantization == "int8"
        is_tied = model.tied
        for path, module in model.named_modules():
            is_dense = path.endswith("gate") or (path == "embed_tokens" and not is_tied)
            if isinstance(module, MatrixModule):
                assert (module.packed is None) == is_dense
                assert (module.weight.numel() > 0) == is_dense
            elif isinstance(module, Experts):
                assert module.packed is not None
                assert module.gate_up.numel() == module.down.numel() == 0
        assert not any(parameter.is_meta for parameter in model.parameters())
        if is_tied:
            assert model.embed_tokens.packed is model.lm_head.packed


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_use_the_scales_of_whole_rows(
    tiny: Path, expected: list[list[int]], size: int, local_ranks: None
) -> None:
    assert run(tiny, quantization="int8", tensor_parallel_size=size) == expected


def test_stages_of_a_pipeline_quantise_their_layers(tiny: Path, expected: list[list[int]], local_ranks: None) -> None:
    assert run(tiny, quantization="int8", pipeline_parallel_size=2) == expected


def test_experts_are_shared_by_ranks(local_ranks: None, tmp_path: Path) -> None:
    save_random(tmp_path / "moe", model_class=Qwen3MoeForCausalLM, **MOE)
    alone = run(tmp_path / "moe", quantization="int8")
    assert run(tmp_path / "moe", quantization="int8", tensor_parallel_size=2) == alone


def test_a_draft_model_is_quantised_too(tiny: Path, expected: list[list[int]]) -> None:
    config = {"method": "draft_model", "model": str(tiny), "num_speculative_tokens": 3}
    assert run(tiny, quantization="int8", speculative_config=config) == expected
    with LLM(str(tiny), quantization="int8", speculative_config=config, **SMALL | {"device": "cpu"}) as llm:
        assert llm.engine.runner.draft.model.lm_head.packed is not None
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        stats = llm.stats()
        assert stats["num_accepted_tokens"] >= 0.9 * stats["num_draft_tokens"] > 0


def test_new_weights_are_quantised(tmp_path: Path) -> None:
    for name in ("old", "new"):
        save_random(tmp_path / name, seed=len(name) if name == "old" else 7)
    expected = run(tmp_path / "new", quantization="int8")
    new = load_file(tmp_path / "new" / "model.safetensors")
    options = SMALL | {"device": "cpu", "attention_backend": "torch"}
    with LLM(str(tmp_path / "old"), quantization="int8", **options) as llm:
        before = [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert before != expected
        for name, tensor in new.items():
            llm.load_weights([(name, tensor)], finish=False)
        llm.load_weights([], finish=True)
        assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected
        llm.load_weights(load_file(tmp_path / "old" / "model.safetensors").items())
        assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == before


@pytest.mark.parametrize("family", ["qwen2", "moe"])
def test_new_weights_of_modules_with_several_parts(family: str, local_ranks: None, tmp_path: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        save_random(tmp_path / name, seed=seed, **FAMILIES[family])
    expected = run(tmp_path / "new", quantization="int8")
    options = SMALL | {"device": "cpu", "attention_backend": "torch", "tensor_parallel_size": 2}
    with LLM(str(tmp_path / "old"), quantization="int8", **options) as llm:
        llm.load_weights(load_file(tmp_path / "new" / "model.safetensors").items())
        assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected


def test_who_sleeps_wakes_up_quantised(tiny: Path, expected: list[list[int]]) -> None:
    with LLM(str(tiny), quantization="int8", **SMALL | {"device": "cpu", "attention_backend": "torch"}) as llm:
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected


def test_an_adapter_is_merged_before_rows_are_rounded(tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    adapter = {}
    generator = torch.Generator().manual_seed(0)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.1.{module}"
        out, size = tensors[f"{name}.weight"].shape
        a = torch.randn(4, size, generator=generator)
        b = torch.randn(out, 4, generator=generator) / 20
        prefix = f"base_model.model.{name}"
        adapter |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + 2 * (b @ a)
    (tmp_path / "lora").mkdir()
    save_file(adapter, tmp_path / "lora" / "adapter_model.safetensors")
    edit_json(tmp_path / "lora" / "adapter_config.json", peft_type="LORA", r=4, lora_alpha=8)
    (tmp_path / "merged").mkdir()
    save_file(tensors, tmp_path / "merged" / "model.safetensors")
    (tmp_path / "merged" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    expected = run(tmp_path / "merged", quantization="int8")
    assert run(tmp_path / "model", quantization="int8", lora=str(tmp_path / "lora")) == expected
    assert run(tmp_path / "model", quantization="int8") != expected


def test_dummy_weights_are_the_same_numbers_rounded(tiny: Path) -> None:
    options = SMALL | {"device": "cpu", "attention_backend": "torch", "load_format": "dummy", "dtype": "bfloat16"}
    with LLM(str(tiny), **options) as dense, LLM(str(tiny), quantization="int8", **options) as llm:
        own = dict(llm.engine.runner.model.named_modules())
        for path, module in dense.engine.runner.model.named_modules():
            if isinstance(module, MatrixModule) and module.weight.numel():
                eye = torch.eye(module.weight.shape[1], dtype=torch.bfloat16)
                codes = quantize_int8(module.weight)
                assert torch.equal(own[path].multiply(eye).T, codes.dequantize().to(torch.bfloat16))
        assert [len(output["token_ids"]) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == [16] * 4


def test_a_bfloat16_engine_rounds_the_checkpoints_own_values(tiny: Path) -> None:
    """Not their bfloat16 roundings: the scale would differ."""
    weight = load_file(tiny / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())
    with LLM(str(tiny), quantization="int8", **SMALL | {"dtype": "bfloat16", "device": "cpu"}) as llm:
        matrix = llm.engine.runner.model.layers[0].mlp.down_proj
        eye = torch.eye(weight.shape[1], dtype=torch.bfloat16)
        assert torch.equal(matrix.multiply(eye).T, quantize_int8(weight).dequantize().bfloat16())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "up_proj"),
        (lambda tensors: tensors.update(extra=torch.zeros(3)), "extra"),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.weight": torch.zeros(64, 8)}),
            r"o_proj.weight has shape \[64, 8\]",
        ),
        (
            lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(500, 64, dtype=torch.int8)}),
            "embed_tokens.weight is I8",
        ),
    ],
    ids=["missing", "left over", "misshapen", "integers"],
)
def test_a_tensor_that_does_not_fit_is_named(change, named: str, tmp_path: Path) -> None:
    save_random(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=named):
        LLM(str(tmp_path), quantization="int8", **SMALL)


def test_options_that_cannot_be_had_say_what_can(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"quantization is 'int9'; it must be one of int8, int8-dynamic, w8a8, awq, gptq,"
    ):
        LLM(str(tiny), quantization="int9")
    with pytest.raises(ValueError, match=r'has no quantization_config.*quantization="int8"'):
        LLM(str(tiny), quantization="awq", **SMALL)
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    for method in ("bitsandbytes", "quark", "aqlm", 3):
        edit_json(tmp_path / "config.json", quantization_config={"quant_method": method})
        with pytest.raises(ValueError, match=f"{method}.*not supported: use the original checkpoint"):
            LLM(str(tmp_path), load_format="dummy", **SMALL)


def test_the_format_is_told_beside_results(tiny: Path) -> None:
    from nanovllm.apps.jobs.provenance import read_provenance

    with LLM(str(tiny), quantization="int8", **SMALL | {"device": "cpu"}) as llm:
        assert read_provenance(llm.engine)["quantization"] == "int8"
    with LLM(str(tiny), **SMALL | {"device": "cpu"}) as llm:
        assert "quantization" not in read_provenance(llm.engine)


def test_an_estimate_knows_int8(capsys: pytest.CaptureFixture[str]) -> None:
    from nanovllm.apps.cli import main

    assert main(["estimate", "qwen3-8b", "--gpu-memory", "16GB"]) == 1
    assert "--quantization int8" in capsys.readouterr().out
    assert main(["estimate", "qwen3-8b", "--gpu-memory", "16GB", "--quantization", "int8"]) == 0
    assert "8.21 GiB in int8" in capsys.readouterr().out


def test_vllms_name_is_understood(tiny: Path, expected: list[list[int]]) -> None:
    assert run(tiny, quantization="int8_per_channel_weight_only") == expected
