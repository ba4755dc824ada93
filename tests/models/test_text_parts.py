"""The text's part of models that take pictures, too, says what transformers' whole class says of text alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.any_models import compare
from helpers.tiny import CROWDED, SMALL_MODEL, VOCAB_SIZE, edit_json
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams
from nanovllm.models.model_config import load_model_config, read_json, take_text_config

OPTIONS = CROWDED | {"attention_backend": "torch"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
IMAGE = VOCAB_SIZE + 1  # no test draws it
VIDEO = VOCAB_SIZE + 2
VISION = {
    **{"depth": 1, "num_heads": 2, "hidden_size": 32, "embed_dim": 32, "out_hidden_size": 64, "intermediate_size": 32},
    **{"patch_size": 14, "deepstack_visual_indexes": [0]},
}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"rope_parameters": {"mrope_section": [6, 5, 5]}},
    "Qwen2_5_VL": {
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "mrope_section": [6, 5, 5],
        }
    },
    "Qwen3VL": {"rope_parameters": {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
    "Qwen3VLMoe": SPARSE | {"rope_parameters": {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
    "Glm4v": {"rope_parameters": {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}},
    "Glm4vMoe": ROUTED | {"rope_parameters": {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}},
}
"""{the stem of transformers' classes: what of its text's configuration is its own}."""
NATIVE = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")


@torch.no_grad()
def save_with_pictures(folder: Path, kind: str, **changes: Any) -> PreTrainedModel:
    """Write a small random float32 model that takes pictures, too, and return it. Its heads have 32 elements."""
    torch.manual_seed(0)
    text = (
        SMALL_MODEL
        | {"hidden_size": 128, "vocab_size": VOCAB_SIZE + 4, "tie_word_embeddings": False}
        | KINDS[kind]
        | changes
    )
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4} | text["rope_parameters"]
    vision = VISION | {"out_hidden_size": 128}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, **tokens, tie_word_embeddings=False
    )
    model: PreTrainedModel = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            parameter.normal_(0, 0.3)
        elif parameter.dim() < 2:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_transformers(kind: str, tmp_path: Path) -> None:
    model = save_with_pictures(tmp_path, kind)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert (type(llm.engine.runner.model).__name__ == "AnyDecoder") == (kind not in NATIVE)
        found = compare(model, llm)
    assert found.num_equal == found.num_tokens == 216
    assert found.worst < 1e-3


def test_transformers_code_is_a_second_reference(tmp_path: Path) -> None:
    model = save_with_pictures(tmp_path, "Qwen2VL")
    with LLM(tmp_path, **OPTIONS, model_impl="transformers") as llm:
        assert compare(model, llm).num_equal == 216


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL", "Glm4v"])
def test_older_files_without_nested_parts_are_read(kind: str, tmp_path: Path) -> None:
    """Qwen2-VL and 2.5-VL are published so, with rope_scaling of the type mrope."""
    model = save_with_pictures(tmp_path, kind, rope_parameters={"mrope_section": [6, 5, 5]})
    data = json.loads((tmp_path / "config.json").read_text())
    text = data.pop("text_config")
    text.pop("model_type")
    text.pop("rope_parameters")
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [6, 5, 5]}}
    if kind == "Glm4v":
        rope["rope_scaling"] = {"type": "default", "mrope_section": [6, 5, 5]}
    (tmp_path / "config.json").write_text(json.dumps(text | data | rope))
    with LLM(tmp_path, **OPTIONS) as llm:
        assert compare(model, llm).num_equal == 216


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"quantization": "int8"}], ids=str)
def test_experts_that_are_published_turned_are_turned_back(
    options: dict[str, Any], local_ranks: None, tmp_path: Path
) -> None:
    """Qwen3-VL's files have [in, out] of each expert. transformers saves them anew as [out, in]."""
    save_with_pictures(tmp_path, "Qwen3VLMoe")
    prompts = [[5, 7, 11, 300, 42], list(range(70))]

    def run() -> list[list[int]]:
        with LLM(tmp_path, **OPTIONS | options) as llm:
            return [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]

    expected = run()
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".mlp.experts." in name}
    assert len(turned) == 4
    save_file(tensors | turned, tmp_path / "model.safetensors", {"format": "pt"})
    assert run() == expected


def test_a_prompt_that_asks_for_a_picture_is_refused(tmp_path: Path) -> None:
    from nanovllm.features.conversations import read_conversation

    save_with_pictures(tmp_path, "Qwen3VL")
    with LLM(tmp_path, **OPTIONS) as llm:
        for token_id, name in ((IMAGE, "image_token_id"), (VIDEO, "video_token_id")):
            with pytest.raises(
                ValueError, match=rf"token id {token_id}, which is the {name} of config.json: it stands"
            ):
                llm.generate([[5, token_id, 7]], GREEDY, use_tqdm=False)
    picture = [{"type": "image_url", "image_url": {"url": "file:cat.png"}}]
    with pytest.raises(ValueError, match=r"message 0 has the content .*only text is supported"):
        read_conversation([{"role": "user", "content": picture}])


def test_a_stand_in_of_a_model_through_transformers_code_is_refused(tmp_path: Path) -> None:
    save_with_pictures(tmp_path, "Glm4v")
    with LLM(tmp_path, **OPTIONS) as llm, pytest.raises(ValueError, match="which is the image_token_id"):
        llm.generate([[5, IMAGE]], GREEDY, use_tqdm=False)


def test_a_key_that_the_part_has_and_config_json_denies_is_the_part_s(tmp_path: Path) -> None:
    """transformers' classes read no norm_topk_prob there, and no window."""
    model = save_with_pictures(tmp_path, "Qwen3VLMoe")
    data = json.loads((tmp_path / "config.json").read_text())
    data["text_config"] |= {"norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 4}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with LLM(tmp_path, **OPTIONS) as llm:
        assert compare(model, llm).num_equal == 216


def test_what_a_class_refuses_is_told(tmp_path: Path) -> None:
    save_with_pictures(tmp_path, "Qwen2VL")
    data = take_text_config(read_json(tmp_path / "config.json"))
    with pytest.raises(ValueError, match=r"config\.json is not a valid configuration of 'qwen2_vl_text'"):
        load_model_config(data | {"hidden_size": "wide"}, "config.json")
    edit_json(tmp_path / "config.json", architectures=["Qwen2VLForSequenceClassification"])
    with pytest.raises(ValueError, match="names 'Qwen2VLForSequenceClassification'; supported are"):
        LLM(tmp_path, **OPTIONS)
