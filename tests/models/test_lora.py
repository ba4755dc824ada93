"""A merged LoRA adapter gives the tokens of PEFT's merge_and_unload."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import LINEAR, save_adapter
from helpers.hybrids import save_hub_form
from helpers.tiny import BLOCK, draw_prompts, edit_json, greedy_all, save_random
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3_5ForCausalLM, Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.features.adapters.lora import Adapter

peft = pytest.importorskip("peft")

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 96,
    "kvcache_block_size": BLOCK,
    "num_kvcache_blocks": 24,
}
PROMPTS = draw_prompts([1, 15, 40])


def say(folder: Path, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(folder, **OPTIONS | options) as llm:
        return [output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("model_class", [Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
        {"target_modules": "all-linear", "r": 3},
        {"target_modules": [*LINEAR, "lm_head"], "layers_to_transform": None},
    ],
    ids=["all of a layer", "rank-stabilised, two targets", "all-linear", "the head"],
)
def test_tokens_are_those_of_merge_and_unload(
    model_class: type[PreTrainedModel], changes: dict[str, Any], tmp_path: Path
) -> None:
    model = save_random(tmp_path / "model", model_class=model_class, tie_word_embeddings=False)
    plain = say(tmp_path / "model")
    assert plain == greedy_all(model, PROMPTS, 20, plain)
    merged = save_adapter(model, tmp_path / "adapter", **changes)
    said = say(tmp_path / "model", lora=str(tmp_path / "adapter"))
    assert said == greedy_all(merged, PROMPTS, 20, said)
    assert said != plain


def test_compiled_kernels_and_bfloat16_round_once(tmp_path: Path) -> None:
    model = save_random(tmp_path / "model")
    merged = save_adapter(model, tmp_path / "adapter")
    merged.save_pretrained(tmp_path / "merged")
    options: dict[str, Any] = {"attention_backend": "cpu", "dtype": "bfloat16"}
    one = say(tmp_path / "model", lora=tmp_path / "adapter", **options)
    assert one == say(tmp_path / "merged", **options)


DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]


@pytest.mark.parametrize("targets", [[*LINEAR, *DELTA], "all-linear"], ids=["the text model", "all-linear"])
def test_an_adapter_of_the_form_on_the_hub(targets: list[str] | str, tmp_path: Path) -> None:
    """Its names have "language_model." in them. The part for pictures is not read, nor what is to change it."""
    model = save_hub_form(tmp_path / "model")
    plain = say(tmp_path / "model")
    merged = save_adapter(model, tmp_path / "adapter", target_modules=targets)
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert "base_model.model.model.language_model.layers.0.linear_attn.in_proj_qkv.lora_A.weight" in names
    assert any("visual" in name for name in names) == (targets == "all-linear")
    said = say(tmp_path / "model", lora=str(tmp_path / "adapter"))
    assert said == greedy_all(merged, PROMPTS, 20, said)
    assert said != plain


@pytest.mark.parametrize("is_hub_form", [True, False], ids=["of the whole, for the text model", "the other way round"])
def test_an_adapter_fits_both_forms_of_a_model(is_hub_form: bool, tmp_path: Path) -> None:
    """An adapter that was made for the whole model is merged into its text model alone, and the other way round."""
    whole = save_hub_form(tmp_path / "whole")
    text = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "whole", tie_word_embeddings=True)
    text.save_pretrained(tmp_path / "text")
    merged = save_adapter(whole if is_hub_form else text, tmp_path / "adapter", target_modules=[*LINEAR, *DELTA])
    said = say(tmp_path / ("text" if is_hub_form else "whole"), lora=str(tmp_path / "adapter"))
    assert said == greedy_all(merged, PROMPTS, 20, said)


@pytest.mark.parametrize("kind", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_merge_their_shares(kind: str, local_ranks: None, tmp_path: Path) -> None:
    model = save_random(tmp_path / "model")
    merged = save_adapter(model, tmp_path / "adapter")
    said = say(tmp_path / "model", lora=str(tmp_path / "adapter"), **{kind: 2})
    assert said == greedy_all(merged, PROMPTS, 20, said)


def test_the_draft_model_stays_as_it_is(tmp_path: Path) -> None:
    model = save_random(tmp_path / "model")
    save_random(tmp_path / "draft", seed=1, num_hidden_layers=1)
    merged = save_adapter(model, tmp_path / "adapter")
    drafts = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    said = say(tmp_path / "model", lora=str(tmp_path / "adapter"), speculative_config=drafts)
    assert said == greedy_all(merged, PROMPTS, 20, said)


def test_an_adapter_is_part_of_a_job_s_provenance(random_model: Path, tmp_path: Path) -> None:
    from nanovllm.apps.jobs.provenance import read_provenance

    facts = []
    for seed in (None, 1, 2):
        options = dict(OPTIONS)
        if seed is not None:
            from transformers import AutoModelForCausalLM

            folder = tmp_path / str(seed)
            save_adapter(AutoModelForCausalLM.from_pretrained(random_model), folder, r=seed)
            options["lora"] = str(folder)
        with LLM(random_model, **options) as llm:
            facts.append(read_provenance(llm.engine))
    assert "lora" not in facts[0]
    assert facts[1]["lora"] != facts[2]["lora"]


CONFIG_FAULTS = {
    "DoRA": ({"use_dora": True}, "'use_dora' is not supported"),
    "bias": ({"bias": "all"}, "bias is 'all'"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is not supported"),
    "rank pattern": ({"rank_pattern": {"q_proj": 2}}, "'rank_pattern' is not supported"),
    "alpha pattern": ({"alpha_pattern": {"q_proj": 2}}, "'alpha_pattern' is not supported"),
    "fan in": ({"fan_in_fan_out": True}, "'fan_in_fan_out' is not supported"),
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, "which may change the model's own weights"),
    "LoRA-GA": ({"init_lora_weights": "lora_ga"}, "which may change the model's own weights"),
    "repeated layers": ({"layer_replication": [[0, 1], [0, 1]]}, "'layer_replication' is not supported"),
    "a key of another program": ({"scale_by_layer": 2}, "'scale_by_layer' is not supported"),
    "no rank": ({"r": "four"}, "r is 'four'"),
    "another rank": ({"r": 5}, r"and r=5; the checkpoint's matrix is \["),
    "endless alpha": ({"lora_alpha": 1e999}, "lora_alpha is inf"),
}


@pytest.fixture(scope="module")
def adapter(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(AutoModelForCausalLM.from_pretrained(random_model), folder)
    return folder


def copy_adapter(adapter: Path, folder: Path) -> Path:
    for path in adapter.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_what_cannot_be_merged_is_refused_by_name(
    fault: str, random_model: Path, adapter: Path, tmp_path: Path
) -> None:
    changes, message = CONFIG_FAULTS[fault]
    edit_json(copy_adapter(adapter, tmp_path) / "adapter_config.json", **changes)
    with pytest.raises(ValueError, match=message):
        LLM(random_model, **OPTIONS, lora=str(tmp_path))


@pytest.mark.parametrize("start", ["gaussian", "orthogonal", "mica", "olora", "pissa", "pissa_niter_2"])
def test_an_initialisation_is_refused_if_and_only_if_peft_changes_the_models_weights_with_it(
    start: str, random_model: Path, tmp_path: Path
) -> None:
    model = Qwen3ForCausalLM.from_pretrained(random_model)
    name = "model.layers.0.self_attn.q_proj.weight"
    before = model.get_parameter(name).clone()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=start))
    adapted.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["init_lora_weights"] == start
    after = adapted.base_model.model.get_parameter(name.replace(".weight", ".base_layer.weight"))
    if torch.equal(before, after):
        Adapter(str(tmp_path))
    else:
        with pytest.raises(ValueError, match="which may change the model's own weights"):
            Adapter(str(tmp_path))


@pytest.mark.parametrize("value", [None, False, 0, [], {}, ""])
def test_a_key_that_is_not_known_is_refused_unless_its_value_asks_for_nothing(
    value: Any, adapter: Path, tmp_path: Path
) -> None:
    config = copy_adapter(adapter, tmp_path) / "adapter_config.json"
    edit_json(config, strange=value)
    Adapter(str(tmp_path))
    edit_json(config, strange=[value])
    with pytest.raises(ValueError, match="'strange' is not supported"):
        Adapter(str(tmp_path))


def test_wrong_tensors_are_refused_by_name(random_model: Path, adapter: Path, tmp_path: Path) -> None:
    weights = copy_adapter(adapter, tmp_path) / "adapter_model.safetensors"
    original = load_file(weights)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    other = name.replace("layers.0", "layers.7")
    cases: list[tuple[dict[str, Any], str]] = [
        ({name: original[name][:, :-1].contiguous()}, "the checkpoint's matrix is"),
        ({name.replace("lora_A", "lora_B"): None}, "which cannot be merged"),
        ({name: None}, "which cannot be merged"),
        ({"base_model.model.model.norm.weight": torch.ones(4)}, "which cannot be merged"),
        ({other: original[name].clone(), other.replace("A", "B"): torch.ones(4, 4)}, "that are not in the checkpoint"),
        ({name: torch.tensor(1.0)}, r"q_proj.weight. as \[128, 4\] times \[\], and r=4"),
        (
            {name.replace("lora_A", "lora_B"): torch.ones(4)},
            r"as \[4\] times .*; the checkpoint's matrix is",
        ),
        (dict.fromkeys(original), "changes no matrix"),
        ({"base_model.model.model.embed_tokens.weight": torch.ones(500, 64)}, "with other values than the checkpoint"),
    ]
    for changes, message in cases:
        save_file({key: value for key, value in (original | changes).items() if value is not None}, weights)
        with pytest.raises(ValueError, match=message):
            LLM(random_model, **OPTIONS, lora=str(tmp_path))
    weights.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="cannot be read"):
        LLM(random_model, **OPTIONS, lora=str(tmp_path))


def test_what_is_no_adapter_is_refused(random_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"which has no adapter_config\.json"):
        LLM(random_model, **OPTIONS, lora=str(tmp_path))
    for name in ("x" * 5000, "~nosuch/x"):
        with pytest.raises(ValueError, match=f"lora '{name[:9]}.* cannot be a folder"):
            LLM(random_model, **OPTIONS, lora=name)
    with pytest.raises(ValueError, match=r"lora is 3; it must be a folder"):
        LLM(random_model, lora=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"load_format=.dummy."):
        LLM("qwen3-0.6b", load_format="dummy", lora="anything")
