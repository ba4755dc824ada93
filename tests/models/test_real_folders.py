"""Folders of other people are read as transformers reads them, or refused by what they are."""

import json
import shutil
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.hybrids import save_hub_form
from helpers.quantized import CHECKPOINTS, run, save_quantised
from helpers.tiny import SMALL, draw_prompts, edit_json, greedy, save_random
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3_5ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanovllm import LLM, SamplingParams
from nanovllm.models import model_folder
from nanovllm.models.config_sizes import MOST
from nanovllm.models.model_config import limit_length, load_model_config, read_values
from nanovllm.models.model_folder import ModelFolder
from nanovllm.models.sizes import Sizes
from nanovllm.utils import memory

OPTIONS = SMALL | {"device": "cpu", "attention_backend": "torch"}
PROMPTS = draw_prompts([3, 20])
HEAD = "lm_head.weight"


def say(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(folder, **OPTIONS | options) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return [output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def fail(folder: Path, **options: Any) -> str:
    """Return the message of the ValueError that loading the model raises."""
    with pytest.raises(ValueError) as caught:
        LLM(folder, **OPTIONS | options).close()
    return str(caught.value)


def ask_transformers(model: Any) -> list[list[int]]:
    return [greedy(model, prompt, 8) for prompt in PROMPTS]


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to a checkpoint, or replace them."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: tensor.clone() for name, tensor in tensors.items()}, path, {"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small Llama with a head of its own."""
    save_random(tmp_path / "llama", model_class=LlamaForCausalLM, head_dim=16, tie_word_embeddings=False)
    return tmp_path / "llama"


# ---- the LM head


def test_a_head_of_its_own_is_used_whatever_config_json_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers does it: a head with other values is not tied, and an equal one is."""
    save_random(tmp_path, tie_word_embeddings=False)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    expected = ask_transformers(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert say(tmp_path) == expected
    assert "a head of its own with other values, which is used" in caplog.text
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    add_tensors(tmp_path, {HEAD: embedding.clone()})
    assert say(tmp_path) == ask_transformers(AutoModelForCausalLM.from_pretrained(tmp_path)) != expected
    with LLM(tmp_path, **OPTIONS) as llm:
        assert llm.engine.runner.model.tied  # type: ignore[attr-defined]
    add_tensors(tmp_path, {HEAD: embedding[:-2].clone()})
    assert f"{HEAD} has shape [498, 64]; config.json asks for [500, 64]" in fail(tmp_path)


@pytest.mark.parametrize("has_own_head", [True, False])
@pytest.mark.parametrize("level", ["outside", "inside", "both"])
def test_either_level_of_a_nested_config_may_say_that_the_head_is_tied(
    level: str, has_own_head: bool, tmp_path: Path
) -> None:
    model = save_hub_form(tmp_path, is_tied=not has_own_head)
    assert isinstance(model, Qwen3_5ForConditionalGeneration)
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = level in ("outside", "both")
    config["text_config"]["tie_word_embeddings"] = level in ("inside", "both")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (HEAD in load_file(tmp_path / "model.safetensors")) == has_own_head
    assert say(tmp_path) == ask_transformers(model)


# ---- tensors that change nothing

ATTENTION = "model.layers.0.self_attn"
ONE = torch.ones(1)
FREQUENCIES = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
ANGLES = torch.outer(torch.arange(64.0), FREQUENCIES)
COSINES = torch.cat((ANGLES, ANGLES), dim=1).cos()[None, None]
SINES = torch.cat((ANGLES, ANGLES), dim=1).sin()
IDLE: dict[str, dict[str, Tensor]] = {
    "frequencies": {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": FREQUENCIES for i in (0, 1)},
    "frequencies of the model": {"model.rotary_emb.inv_freq": FREQUENCIES.half()},
    "frequencies of 16 bits": {f"{ATTENTION}.rotary_emb.inv_freq": FREQUENCIES.bfloat16()},
    "cached sines": {f"{ATTENTION}.rotary_emb.cos_cached": COSINES.half(), f"{ATTENTION}.rotary_emb.sin_cached": SINES},
    "mask": {f"{ATTENTION}.bias": torch.ones(1, 1, 9, 9).tril().byte(), f"{ATTENTION}.masked_bias": -1e9 * ONE},
    "KV scales": {f"{ATTENTION}.k_scale": ONE * 0.02, f"{ATTENTION}.v_scale": torch.tensor(0.5)},
    "one KV scale": {f"{ATTENTION}.kv_scale": ONE},
    "KV scales of projections": {f"{ATTENTION}.k_proj.k_scale": ONE, f"{ATTENTION}.v_proj.v_scale": ONE.bfloat16()},
    "KV scales of outputs": {f"{ATTENTION}.k_proj.output_scale": ONE, f"{ATTENTION}.v_proj.output_scale": ONE},
    "KV scales of an inner module": {f"{ATTENTION}.attn.k_scale": ONE, f"{ATTENTION}.attn.q_scale": ONE},
    "zero points": {f"{ATTENTION}.k_scale": ONE, f"{ATTENTION}.k_zero_point": 0 * ONE},
    "zero biases": {f"{ATTENTION}.q_proj.bias": torch.zeros(64), "model.layers.1.mlp.up_proj.bias": torch.zeros(96)},
    "no elements": {f"{ATTENTION}.core_attention._extra_state": torch.zeros(0, dtype=torch.uint8)},
}
DOUBTFUL = {
    "frequencies": ({"model.rotary_emb.inv_freq": FREQUENCIES**1.2}, "inv_freq is not what config.json's rope_theta"),
    "a number": ({f"{ATTENTION}.rotary_emb.cos_cached": torch.tensor(1.0)}, "the cached cosines are not what"),
    "sines": ({f"{ATTENTION}.rotary_emb.cos_cached": SINES}, "cached cosines are not what config.json's rope_theta"),
    "scale": ({f"{ATTENTION}.k_scale": -ONE}, "a scale of the KV cache is not a positive number"),
    "mask": ({f"{ATTENTION}.bias": torch.ones(9, 9)}, "a mask hides other tokens"),
    "bias": ({f"{ATTENTION}.q_proj.bias": torch.full((64,), 1e-6)}, "biases that are not zero"),
    "scales of inputs": ({f"{ATTENTION}.q_proj.smooth_scale": torch.ones(64)}, "looks like a checkpoint with scales"),
}


@pytest.mark.parametrize("kind", IDLE)
def test_tensors_that_change_nothing_are_skipped(kind: str, llama: Path) -> None:
    expected = ask_transformers(AutoModelForCausalLM.from_pretrained(llama))
    add_tensors(llama, IDLE[kind])
    assert say(llama) == expected


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_such_tensors_with_values_that_change_something_are_refused(kind: str, llama: Path) -> None:
    tensors, words = DOUBTFUL[kind]
    add_tensors(llama, tensors)
    message = fail(llama)
    assert "has 1 tensors that the model does not" in message and words in message


def test_frequencies_may_be_those_before_their_scaling(llama: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    edit_json(llama / "config.json", rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **scaling})
    expected = say(llama)
    add_tensors(llama, IDLE["frequencies"])
    assert say(llama) == expected


@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "fp8 blocks"])
def test_zero_biases_and_kv_scales_beside_quantised_weights_are_skipped(name: str, tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    quantised, means = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS[name])
    zeros = {
        f"model.layers.{i}.mlp.{matrix}.bias": torch.zeros(96) for i in (0, 1) for matrix in ("gate_proj", "up_proj")
    }
    add_tensors(quantised, zeros | IDLE["KV scales"] | IDLE["KV scales of outputs"])
    config = CHECKPOINTS[name][0]
    edit_json(
        quantised / "config.json", quantization_config=config | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    )
    assert run(quantised) == run(means)


def test_settings_of_the_kv_cache_alone_quantise_no_weights(llama: Path) -> None:
    expected = say(llama)
    add_tensors(llama, IDLE["KV scales"])
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    for settings in (
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ):
        edit_json(llama / "config.json", quantization_config=settings)
        assert say(llama) == expected


# ---- files beside the checkpoint


def add_consolidated(folder: Path) -> None:
    save_file({"tok_embeddings.weight": torch.ones(4, 4)}, folder / "consolidated.safetensors")


def add_copy(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")


def add_torch_files(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')


def add_adapter(folder: Path) -> None:
    save_file({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 4)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def add_old_index(folder: Path) -> None:
    old = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(old, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    weight_map = dict.fromkeys(old, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BESIDE: dict[Callable[[Path], None], str] = {
    add_consolidated: "",
    add_copy: "",
    add_torch_files: "",
    add_adapter: "an adapter (LoRA) beside the model, which is merged only by the option lora=",
    add_old_index: "not read: model-00001-of-00001.safetensors, of which model.safetensors.index.json names some",
}


@pytest.mark.parametrize("add", BESIDE)
def test_files_beside_model_safetensors_are_not_read(
    add: Callable[[Path], None], llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    add(llama)
    assert say(llama) == ask_transformers(model)
    assert (BESIDE[add] in caplog.text) if BESIDE[add] else (caplog.text == "")


@pytest.mark.parametrize("has_index", [True, False])
def test_of_a_checkpoint_in_shards_its_shards_alone_are_read(has_index: bool, tmp_path: Path) -> None:
    model = save_random(tmp_path, max_shard_size="60KB")
    shards = ModelFolder(tmp_path).files
    assert len(shards) > 2
    add_consolidated(tmp_path)
    add_adapter(tmp_path)
    save_file({"extra": torch.ones(2)}, tmp_path / "extra.safetensors")
    if not has_index:
        (tmp_path / "model.safetensors.index.json").unlink()
    assert ModelFolder(tmp_path).files == shards
    assert say(tmp_path) == ask_transformers(model)


def test_an_index_may_name_model_safetensors_among_others(tmp_path: Path) -> None:
    model = save_random(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm = {"model.norm.weight": tensors.pop("model.norm.weight")}
    save_file(tensors, path)
    save_file(norm, tmp_path / "norm.safetensors")
    weight_map = dict.fromkeys(tensors, path.name) | dict.fromkeys(norm, "norm.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert say(tmp_path) == ask_transformers(model)


def test_shards_of_two_checkpoints_without_an_index_are_refused(tmp_path: Path) -> None:
    save_random(tmp_path, max_shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    shutil.copy(ModelFolder(tmp_path).files[0], tmp_path / "model-00001-of-00002.safetensors")
    assert "has shards of several checkpoints, such as model-00001-of-00002.safetensors and" in fail(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
@pytest.mark.parametrize("target", ["itself", "nothing", "a folder"])
def test_a_link_that_leads_to_no_file_is_a_clear_error(name: str, target: str, llama: Path) -> None:
    if name != "model.safetensors.index.json":
        (llama / "model.safetensors").unlink()
    (llama / "folder").mkdir()
    (llama / name).symlink_to({"itself": name, "nothing": "gone", "a folder": "folder"}[target])
    message = fail(llama)
    assert name in message and ("cannot be read" in message or "is not a file" in message)


# ---- settings of quantisation in files of their own


def move_settings(folder: Path, file: str, **names: str) -> None:
    """Move a checkpoint's quantization_config to a file, with other names of some keys, and without quant_method."""
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps({names.get(key, key): value for key, value in settings.items()}))


@pytest.mark.parametrize(
    ("name", "file", "names"),
    [
        ("gptq", "quantize_config.json", {}),
        ("gptq 8 bits", "quantize_config.json", {}),
        ("awq", "quant_config.json", {"bits": "w_bit", "group_size": "q_group_size"}),
        ("awq", "quantize_config.json", {"bits": "w_bit", "group_size": "q_group_size"}),
    ],
)
def test_settings_of_older_tools_are_read(name: str, file: str, names: dict[str, str], tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    quantised, means = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS[name])
    move_settings(quantised, file, **names)
    assert run(quantised) == run(means)
    settings = json.loads((quantised / file).read_text())
    (quantised / file).write_text(json.dumps(settings | {"w_bit" if names else "bits": 3}))
    message = fail(quantised)
    assert "the checkpoint is quantised, by" in message and f"and its settings are in {file}: " in message
    (quantised / file).unlink()
    message = fail(quantised)
    assert "looks like weights quantised by GPTQ or AWQ, and neither config.json nor quantize_config.json" in message


def pack_float8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """FP8 with one scale for a matrix, and a scale for its inputs, as ModelOpt saves it."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, codes.float() * scale


def test_settings_of_modelopt_are_read(tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    quantised, means = save_quantised(tmp_path / "model", tmp_path, {"quant_method": "modelopt"}, pack_float8)
    move_settings(quantised, "hf_quant_config.json")
    file = quantised / "hf_quant_config.json"
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    add_tensors(quantised, IDLE["KV scales of projections"])
    assert run(quantised) == run(means)
    settings = {"quant_algo": "FP8", "ignore": ["lm_head"]}
    edit_json(quantised / "config.json", quantization_config=settings)  # then the file says whose they are
    assert run(quantised) == run(means)
    edit_json(quantised / "config.json", quantization_config=None)
    file.write_text(json.dumps({"quantization": quantization | {"quant_algo": "NVFP4"}}))
    message = fail(quantised)
    assert "quantised, by 'modelopt', and its settings are in hf_quant_config.json: quant_algo is 'NVFP4'" in message


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_a_producer_is_the_method_where_none_is_named(algorithm: str, tmp_path: Path) -> None:
    save_random(tmp_path / "model")
    quantised, means = save_quantised(tmp_path / "model", tmp_path, {"quant_method": "modelopt"}, pack_float8)
    producer = {"name": "modelopt", "version": "0.31.0"}
    settings = {"quant_algo": algorithm, "ignore": ["lm_head"], "kv_cache_scheme": "FP8", "producer": producer}
    edit_json(quantised / "config.json", quantization_config=settings)
    if algorithm == "FP8":
        assert run(quantised) == run(means)
    else:
        assert "quantization_config of 'modelopt': quant_algo is 'NVFP4'" in fail(quantised)


def test_settings_beside_plain_weights_are_a_leftover(llama: Path) -> None:
    expected = say(llama)
    (llama / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    (llama / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    assert say(llama) == expected


# ---- what a checkpoint looks like

KINDS = {
    "bitsandbytes": ("model.layers.0.mlp.up_proj.weight.absmax", "bitsandbytes"),
    "authors' format": ("layers.0.attention.wq.weight", "the format of the model's authors"),
    "adapter": (f"{ATTENTION}.q_proj.lora_A.weight", "an adapter (LoRA) that is not merged"),
    "wrapped by PEFT": ("base_model.model.lm_head.weight", "PEFT has wrapped"),
    "compiled": ("_orig_mod.model.norm.weight", "a wrapped model"),
    "experts": ("model.layers.0.mlp.experts.0.up_proj.weight", "a mixture of experts"),
    "pictures": ("vision_tower.patch.weight", "also reads pictures"),
    "scores": ("score.weight", "gives scores"),
    "layers": ("model.layers.2.mlp.up_proj.weight", "a model of 3 layers, and config.json says 2"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_with_other_tensors_is_called_what_it_looks_like(kind: str, llama: Path) -> None:
    name, words = KINDS[kind]
    add_tensors(llama, {name: torch.ones(3, 3)})
    message = fail(llama)
    assert name in message and "the checkpoint looks like" in message and words in message


def test_a_folder_of_consolidated_files_alone_is_called_one(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    add_consolidated(llama)
    assert "the format of the model's authors, not transformers': convert it" in fail(llama)


# ---- config.json


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("BF16", torch.bfloat16),
        ("torch.float16", torch.float16),
        ("half", torch.float16),
        ("fp16", torch.float16),
        ("torch.float32", torch.float32),
        ("float", torch.float32),
        ("double", torch.float64),
        ("auto", None),
        ("torch.float8_e4m3fn", None),
    ],
)
def test_spellings_of_a_dtype_are_what_they_mean(
    key: str, spelling: str, dtype: torch.dtype | None, llama: Path
) -> None:
    data = json.loads((llama / "config.json").read_text())
    del data["dtype"]
    assert load_model_config(data | {key: spelling}, "config.json").dtype == dtype
    for wrong in ("bf17", 16, ["bfloat16"], "torch"):
        with pytest.raises(
            ValueError, match=rf"config.json: {key} is .*; it must be one of bfloat16, float16, float32"
        ):
            load_model_config(data | {key: wrong}, "config.json")


def test_an_engine_and_its_tokenizer_read_old_spellings(reciter: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(reciter, tmp_path / "model"))
    edit_json(folder / "config.json", torch_dtype="torch.float32", dtype=None, hidden_act="swish")
    with LLM(folder, **OPTIONS) as llm:
        (output,) = llm.generate(["abc"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert output["text"] == "defg"


@pytest.mark.parametrize("number", [10**5, 10**9, 10**30, 1e12])
@pytest.mark.parametrize("name", MOST)
def test_a_size_that_no_model_has_is_refused_before_anything_is_made(name: str, number: float, llama: Path) -> None:
    if number <= MOST[name]:
        return
    edit_json(llama / "config.json", **{name: number, "layer_types": None})
    for options in ({}, {"load_format": "dummy"}):
        assert f"config.json: {name} is " in fail(llama, **options)


def test_a_size_is_limited_by_whatever_name_a_family_has_for_it() -> None:
    """transformers' classes say under which name they have each size."""
    num_renamed = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config_class = CONFIG_MAPPING[kind]
        for size in MOST.keys() & config_class.attribute_map.keys():
            name = config_class.attribute_map[size]
            with pytest.raises(ValueError, match=rf"config\.json: {name} is 9000000000; it must be at most"):
                read_values({"model_type": kind, name: 9 * 10**9}, config_class, "config.json")
            num_renamed += 1
    assert num_renamed > 100


@pytest.mark.parametrize("level", ["per_layer_config", "list", "plain"])
def test_a_size_is_limited_at_every_level(level: str) -> None:
    data: dict[str, Any] = {"architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text"}
    size = {"intermediate_size": 10**9}
    found = {"per_layer_config": {"0": size}} if level == "per_layer_config" else size
    found = {"intermediate_size": [64, 10**9]} if level == "list" else found
    with pytest.raises(ValueError, match="intermediate_size is 1000000000; it must be at most 1048576"):
        load_model_config(data | found, "config.json")


SMALL_GPT = {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 64}


@pytest.mark.parametrize(
    ("architecture", "positions", "words"),
    [
        (
            "GPT2LMHeadModel",
            10**9,
            "n_positions is 1000000000; it must be a whole number from 1 to 1048576, for the model has a row",
        ),
        ("GPTJForCausalLM", 10**9, "n_positions is 1000000000; it must be a whole number from 1 to"),
        ("GPTJForCausalLM", 0, "n_positions is 0; it must be a whole number from 1 to"),
        ("GPTBigCodeForCausalLM", 10**6, r"its table transformer\.bias would take 10{12} bytes; it may take"),
    ],
)
def test_tables_of_many_positions_are_refused_before_they_take_memory(
    architecture: str, positions: int, words: str
) -> None:
    kind = getattr(transformers, architecture).config_class.model_type
    data = {"architectures": [architecture], "model_type": kind, "n_positions": positions, "rotary_dim": 8, **SMALL_GPT}
    with pytest.raises(ValueError, match=words):
        Sizes(load_model_config(data, "config.json"))


def test_a_model_of_more_tensors_than_any_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.features.families.any_causal import building

    data = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 64, **SMALL_GPT}
    config = load_model_config(data, "config.json")
    monkeypatch.setattr(building, "MOST_PARAMETERS", 15)
    with pytest.raises(ValueError, match="it has more than 15 tensors"):
        Sizes(config)
    monkeypatch.setattr(building, "MOST_PARAMETERS", 17)  # the head's comes before it is tied
    assert Sizes(config).num_parameters


@pytest.mark.parametrize("factor", [1e308, 1e300, 1e17, 1e8, "4.0", None])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_a_rope_stretched_beyond_what_counts_positions_is_refused(factor: Any, architecture: str) -> None:
    kind = getattr(transformers, architecture).config_class.model_type
    rope = {"rope_type": "yarn", "factor": factor, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    data = {"architectures": [architecture], "model_type": kind, "rope_parameters": rope}
    with pytest.raises(ValueError, match=r"config\.json.* factor"):
        load_model_config(data, "config.json")
    config = load_model_config(data | {"rope_parameters": rope | {"factor": 4.0}}, "config.json")
    assert limit_length(config, None) >= 256


@pytest.mark.parametrize("pool", [{"num_kvcache_blocks": 8}, {"kvcache_memory_bytes": 1 << 20}, {}], ids=str)
def test_tables_of_positions_are_as_long_as_the_pool_needs(
    pool: dict[str, int], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CPU_CACHE_LIMIT", 1 << 21)
    right = say(llama)
    edit_json(llama / "config.json", max_position_embeddings=2 * 10**9)
    options = {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "kvcache_block_size": 16}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(llama, **options | pool) as llm:
        num_tokens = llm.engine.scheduler.block_manager.num_blocks * 16
        assert llm.max_model_len == num_tokens
        assert len(llm.engine.runner.model.cos_sin) == num_tokens
        assert llm.engine.runner.device_rows.block_tables.shape[1] == num_tokens // 16
        assert [output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)] == right
    with pytest.raises(ValueError, match="one sequence of max_model_len=2000000 needs"):
        LLM(llama, **options | {"max_model_len": 2000000} | pool)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"])
@pytest.mark.parametrize("number", [0, -8])
def test_a_size_below_one_is_refused(name: str, number: int, llama: Path) -> None:
    edit_json(llama / "config.json", **{name: number, "layer_types": None})
    assert name in fail(llama)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be finite"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; it must be finite"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "rope_theta is 0.0; it must be above 1"),
    ],
)
def test_a_number_that_makes_every_answer_nan_is_refused(changes: dict[str, Any], words: str, llama: Path) -> None:
    edit_json(llama / "config.json", **changes)
    assert words in fail(llama)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2000}, "num_hidden_layers is 2000, and the checkpoint has the tensors of 2 layers"),
        ({"vocab_size": 10**7}, "model.embed_tokens.weight has shape [500, 64]; config.json asks for [10000000, 64]"),
        ({"hidden_size": 10**5}, "asks for [500, 100000] (vocab_size, hidden_size)"),
        ({"intermediate_size": 10**6}, "asks for [64, 1000000] (hidden_size, intermediate_size)"),
        ({"head_dim": 4096}, "asks for [8192, 64] (num_key_value_heads x head_dim, hidden_size)"),
        ({"num_attention_heads": 8}, "asks for [64, 128] (hidden_size, num_attention_heads x head_dim)"),
    ],
)
def test_sizes_other_than_the_checkpoint_s_are_refused_before_memory_is_taken(
    changes: dict[str, Any], words: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_memory(*_: object) -> None:
        raise AssertionError("a module was built")

    monkeypatch.setattr("nanovllm.load.Sizes", take_memory)
    edit_json(llama / "config.json", **changes)
    assert words in fail(llama)


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    """Nobody can know which of the two is meant; the later one would win without a word."""
    save_random(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.language_model.embed_tokens.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight twice"):
        LLM(str(tmp_path), **OPTIONS)


# ---- each file once


def test_each_file_of_settings_and_each_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index alone is read a second time: it says whether the checkpoint still has the same files."""
    save_random(tmp_path, max_shard_size="60KB")
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')  # a leftover: no tensor has codes
    read: list[str] = []

    def count(function: Callable[[Path], Any], path: Path) -> Any:
        read.append(path.name)
        return function(path)

    def list_places(folder: ModelFolder) -> Any:
        read.extend(path.name for path in folder.files)
        return read_headers(folder)

    read_headers = ModelFolder.places.func
    places = cached_property(list_places)
    places.__set_name__(ModelFolder, "places")
    monkeypatch.setattr(ModelFolder, "places", places)
    monkeypatch.setattr(model_folder, "read_json", partial(count, model_folder.read_json))
    say(tmp_path)
    shards = [path.name for path in tmp_path.glob("*.safetensors")]
    index = "model.safetensors.index.json"
    assert len(shards) > 2
    assert sorted(read) == sorted(
        ["config.json", "generation_config.json", "quantize_config.json", index, index, *shards]
    )


def test_who_wakes_up_reads_the_files_that_are_there_now(tmp_path: Path) -> None:
    save_random(tmp_path, max_shard_size="60KB")
    with LLM(tmp_path, **OPTIONS) as llm:
        llm.sleep(level=2)
        for path in tmp_path.glob("*.safetensors*"):
            path.unlink()
        model = save_random(tmp_path, seed=7)
        llm.wake_up()
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == ask_transformers(model)
