"""Causal models of transformers without a family here say, token for token, what transformers says."""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.adapters import save_adapter
from helpers.any_models import CASES, compare, make_config, run_case, save_any
from helpers.paths import ROOT
from helpers.quantized import CHECKPOINTS, round_rows, run, save_quantised, save_with
from helpers.tiny import CROWDED, draw_prompts, edit_json, make_tokenizer, save_random
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import masking_utils
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma import modeling_gemma
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from nanovllm import LLM, SamplingParams
from nanovllm.backends import Backend
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.features.families.any_causal import attend, building, config, decoder, layers, proof
from nanovllm.features.families.any_causal.decoder import AnyDecoder, last_built
from nanovllm.features.families.any_causal.experts import GroupedExperts
from nanovllm.features.families.any_causal.whole import WholeAttention
from nanovllm.models.model_config import OTHERS, find_family, load_model_config, read_values

OPTIONS = CROWDED | {"attention_backend": "torch"}
KINDS = {
    "Gemma3ForCausalLM": "window",
    "Gemma4ForCausalLM": "heads that differ by layer, and shared keys",
    "GptOssForCausalLM": "sinks, and experts that are stored transposed",
    "DeepseekV3ForCausalLM": "latent attention and experts",
    "GPT2LMHeadModel": "learned positions, and matrices that are not nn.Linear",
}
"""An architecture of each kind."""

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
QUICK = ("awq", "gptq desc_act", "packed with zeros", "int8 w8a8", "fp8 blocks", "fp8 rows")
"""Checkpoints of each kind. The others are slow tests."""


def generate(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(draw_prompts([30, 5, 70]), GREEDY, use_tqdm=False)]


# ---- tokens


PLAIN = {*KINDS, "LlamaForCausalLM", "Gemma2ForCausalLM", "MiniCPM3ForCausalLM", "CohereForCausalLM"}
"""Architectures whose tokens are compared plainly. All together take half a minute: the others are slow tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in PLAIN else pytest.mark.slow) for name in CASES]
)
def test_tokens_are_transformers(name: str, tmp_path: Path) -> None:
    """Log-probabilities differ by rounding: by 1e-4 at most, but in random models with huge logits more."""
    found, stats = run_case(tmp_path, name)
    assert stats["num_preemptions"] and stats["num_cached_tokens"]
    assert found.num_equal == found.num_tokens == 216
    assert found.worst < 1e-3


def test_what_needs_no_proof_at_load_is_what_is_tested_and_what_the_page_lists() -> None:
    assert set(CASES) == proof.TESTED
    page = (ROOT / "docs" / "any-model-compared.md").read_text()
    assert re.findall(r"^\| `(\w+)` ", page, re.MULTILINE) == sorted(CASES)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", *KINDS, "MiniCPM3ForCausalLM"])
def test_compiled_kernels_say_the_same(name: str, tmp_path: Path) -> None:
    found, _ = run_case(tmp_path, name, attention_backend="cpu")
    assert found.num_equal == found.num_tokens
    assert found.worst < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Gemma4ForCausalLM", "GptOssForCausalLM"])
def test_cuda_graphs_replay_transformers_code(name: str, tmp_path: Path) -> None:
    """A rehearsal on the CPU, with stand-ins for CUDA, and Triton's kernels in its interpreter."""
    pytest.importorskip("triton")
    from helpers.rehearsal import rehearse

    save_any(tmp_path, name, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=200)
    prompts = [[token % 200 for token in prompt] for prompt in draw_prompts([3, 24, 1])]
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    params = replace(GREEDY, max_tokens=4)
    with LLM(tmp_path, device="cpu", attention_backend="torch", **options) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with rehearse(), LLM(tmp_path, **options) as llm:
        assert (llm.engine.config.use_graphs, llm.engine.config.attention_backend) == (True, "triton")
        assert [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == expected


def test_heads_are_padded_to_what_the_kernels_take(tmp_path: Path) -> None:
    model = save_any(tmp_path, "PhiForCausalLM", hidden_size=80)  # 4 heads of 20
    for backend, stored in (("torch", 20), ("cpu", min(dim for dim in CpuBackend.head_dims if dim >= 20))):
        with LLM(tmp_path, **OPTIONS | {"attention_backend": backend}) as llm:
            assert compare(model, llm).num_equal == 216
            assert llm.engine.runner.caches[0].keys.shape[3] == stored
            assert llm.engine.runner.count_block_bytes() == 2 * 2 * 16 * 2 * stored * 4  # layers, sides, tokens, heads


ATTEND = attend.AttentionLayer.attend
WHOLE = {
    "LlamaForCausalLM": True,
    "Qwen3ForCausalLM": True,  # norms of heads
    "Gemma3ForCausalLM": True,  # norms with 1 + weight
    "Starcoder2ForCausalLM": True,  # biases
    "Exaone4ForCausalLM": True,  # a layer without rotation
    "CohereForCausalLM": False,  # rotates neighbours, not halves
    "OlmoForCausalLM": False,  # clamps queries, keys and values
    "HunYuanDenseV1ForCausalLM": False,  # norms after the rotation
    "Olmo2ForCausalLM": False,  # one norm of all heads
    "Ministral3ForCausalLM": False,  # scales queries by their positions
    "GptOssForCausalLM": False,  # sinks
}
"""{an architecture: whether the engine's operators compute all that its attention does}. Each differs in one thing."""


@pytest.mark.parametrize("name", WHOLE)
def test_a_trial_says_which_attention_is_computed_as_a_whole(name: str) -> None:
    model = AnyDecoder(make_config(name))
    for layer in model.layers:
        assert isinstance(layer.self_attn.module.__dict__.get("forward"), WholeAttention) == WHOLE[name]


@pytest.mark.parametrize(("name", "is_whole"), [("NemotronForCausalLM", False), ("Qwen3ForCausalLM", True)])
def test_angles_of_a_part_of_a_head_stay_transformers_code(
    name: str, is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nemotron's code rotates as many elements as there are angles. In the trial, these are all."""
    calls = []
    monkeypatch.setattr(attend.AttentionLayer, "attend", lambda *given: calls.append(given) or ATTEND(*given))
    save_any(tmp_path, name)
    with LLM(tmp_path, **OPTIONS | {"model_impl": "transformers"}) as llm:
        assert isinstance(llm.engine.runner.model.layers[0].self_attn.module.forward, WholeAttention)
        generate(llm)
    assert bool(calls) != is_whole


class CountsPositions(LlamaAttention):
    """Scales queries by positions that it counts itself, as Llama 4 does."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **named: Any) -> Any:
        scales = torch.arange(hidden_states.shape[1]) // 8192 + 1
        return super().forward(hidden_states * scales[None, :, None], position_embeddings, attention_mask, **named)


class ReadsPositions(LlamaAttention):
    """Scales queries by the positions that its layer gives it, from some position on."""

    names = ("position_ids", "cache_position")

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **named: Any) -> Any:
        found = [named[name] for name in self.names if named.get(name) is not None]
        if found:
            hidden_states = hidden_states * (1 + found[0].reshape(1, -1, 1) // 8192)
        return super().forward(hidden_states, position_embeddings, attention_mask, **named)


class TakesScale(LlamaAttention):
    """Has an argument that a layer may give, or not."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        factor: Any = None,
        **named: Any,
    ) -> Any:
        hidden_states = hidden_states if factor is None else hidden_states * factor
        return super().forward(hidden_states, position_embeddings, attention_mask, **named)


@pytest.mark.parametrize("kind", [CountsPositions, ReadsPositions, TakesScale])
def test_a_module_that_may_do_more_than_the_trial_sees_stays_transformers_code(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaAttention", kind)
    for layer in AnyDecoder(make_config("LlamaForCausalLM")).layers:
        assert type(layer.self_attn.module) is kind
        assert "forward" not in layer.self_attn.module.__dict__


DIFFERENCES: dict[str, tuple[Any, Any]] = {
    "a child's class": (torch.nn.SiLU(), torch.nn.GELU()),
    "a child's setting": (torch.nn.SiLU(), torch.nn.Threshold(0.5, 0.0)),
    "a child's child": (torch.nn.Sequential(torch.nn.SiLU()), torch.nn.Sequential(torch.nn.ReLU())),
    "a tuple": ((1.0, 1.0), (1.0, 0.5)),
    "a list in a dict": ({"factors": [1.0]}, {"factors": [0.5]}),
    "a function": (F.silu, F.gelu),
    "a tensor": (torch.ones(2), torch.zeros(2)),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_modules_are_alike_only_if_all_parts_of_them_are(name: str) -> None:
    first, second = DIFFERENCES[name]
    own = make_config("LlamaForCausalLM")
    modules = [modeling_llama.LlamaMLP(own) for _ in range(3)]
    for module, part in zip(modules, (first, second, first), strict=True):
        module.part = part
    described = [layers.describe(module.to("meta")) for module in modules]
    assert described[0] != described[1]
    assert described[0] == described[2]
    assert len(set(described)) == 2


def test_an_mlp_with_another_activation_stays_transformers_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's MLP is tried, and the second one's is not alike."""
    init = modeling_llama.LlamaDecoderLayer.__init__

    def change(self: Any, config: Any, layer_idx: int) -> None:
        init(self, config, layer_idx)
        if layer_idx == 1:
            self.mlp.act_fn = torch.nn.GELU()

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", change)
    body: Any = AnyDecoder(make_config("LlamaForCausalLM")).body
    assert [isinstance(layer.mlp, layers.SwiGLU) for layer in body.layers] == [True, False]


def test_a_module_that_gets_more_than_the_trial_gave_stays_transformers_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = modeling_llama.LlamaDecoderLayer.forward
    monkeypatch.setattr(
        modeling_llama.LlamaDecoderLayer, "forward", lambda *given, **named: forward(*given, **named, factor=2)
    )
    calls = []
    monkeypatch.setattr(attend, "HARMLESS", attend.HARMLESS | {"factor"})  # or the model is refused
    monkeypatch.setattr(attend.AttentionLayer, "attend", lambda *given: calls.append(given) or ATTEND(*given))
    save_any(tmp_path, "LlamaForCausalLM")
    with LLM(tmp_path, **OPTIONS | {"model_impl": "transformers"}) as llm:
        generate(llm)
    assert calls


def test_the_text_part_of_a_checkpoint_with_pictures_runs(tmp_path: Path) -> None:
    text = save_any(tmp_path / "text", "Gemma3ForCausalLM").config
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    whole = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    own = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path / "text").float().eval()
    whole.model.language_model.load_state_dict(own.model.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    with LLM(tmp_path / "whole", **OPTIONS) as llm:
        found = compare(own, llm)
    assert found.num_equal == found.num_tokens
    assert found.worst < 1e-3


@torch.no_grad()
def test_the_text_part_may_be_called_text_model(tmp_path: Path) -> None:
    """As in Idefics 2 and 3 and SmolVLM."""
    text = save_any(tmp_path / "text", "LlamaForCausalLM").config
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SmolVLMConfig(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, tie_word_embeddings=False
    )
    whole = transformers.SmolVLMForConditionalGeneration(config).float().eval()
    own = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "text").float().eval()
    whole.model.text_model.load_state_dict(own.model.state_dict())
    whole.lm_head.weight.copy_(own.lm_head.weight)
    whole.save_pretrained(tmp_path / "whole")
    assert any(name.startswith("model.text_model.") for name in load_file(tmp_path / "whole" / "model.safetensors"))
    with LLM(tmp_path / "whole", **OPTIONS) as llm:
        assert compare(own, llm).num_equal == 216


def test_the_lm_head_is_the_checkpoint_s_own_where_it_has_one(tmp_path: Path) -> None:
    model = save_any(tmp_path, "GPTNeoXForCausalLM")
    assert not model.config.tie_word_embeddings
    with LLM(tmp_path, **OPTIONS) as llm:
        assert compare(model, llm).num_equal == 216


OTHER_NAMES = ("GPT2LMHeadModel", "OPTForCausalLM", "BioGptForCausalLM", "GPTNeoXForCausalLM")
"""Architectures that call the embedding, or the LM head too, otherwise than most do."""


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_head_of_its_own_is_used_whatever_config_json_says(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does it: a head with other values is not tied, and an equal one is."""
    model = save_any(tmp_path, name, tie_word_embeddings=False)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert compare(model, llm).num_equal == 216
    assert "a head of its own with other values, which is used" in caplog.text
    head, embedding = config.name_ends(model.config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[head] = tensors[embedding].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with LLM(tmp_path, **OPTIONS) as llm:
        assert llm.engine.runner.model.tied  # type: ignore[attr-defined]
        assert compare(type(model).from_pretrained(tmp_path).eval(), llm).num_equal == 216


@pytest.mark.parametrize("name", OTHER_NAMES[:3])
def test_a_tied_model_takes_all_weights_of_a_trainer(name: str, tmp_path: Path) -> None:
    """Its head among them, which equals the embedding. A head with other values is refused by its name."""
    old = save_any(tmp_path / "old", name, tie_word_embeddings=True)
    new = save_any(tmp_path / "new", name, seed=1, tie_word_embeddings=True)
    head, embedding = config.name_ends(old.config)
    tensors = new.state_dict()
    assert {head, embedding} <= tensors.keys()
    with LLM(tmp_path / "old", **OPTIONS) as llm:
        with pytest.raises(ValueError, match=f"{head} has other values than {embedding}"):
            llm.load_weights((tensors | {head: tensors[head] + 1}).items())
        llm.load_weights(tensors.items())
        assert compare(new, llm).num_equal == 216


@pytest.mark.parametrize("name", CASES)
def test_head_and_embedding_have_the_names_that_checkpoints_have(name: str) -> None:
    with building.parameters_on_meta():
        model = getattr(transformers, name)(make_config(name, tie_word_embeddings=False))
    names = revert_weight_conversion(model, model.state_dict())
    assert set(config.name_ends(model.config)) <= names.keys()


def test_a_pad_token_in_config_json_changes_nothing(tmp_path: Path) -> None:
    """transformers' GPT-2 then reads the ids, to warn about pad tokens."""
    model = save_any(tmp_path, "GPT2LMHeadModel", pad_token_id=7)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert compare(model, llm).num_equal == 216


def test_longrope_has_the_table_of_its_original_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.5] * 4,
        "long_factor": [4.0, 8.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 160,
    }
    model = save_any(
        tmp_path, "Phi3ForCausalLM", head_dim=..., rope_parameters=rope, original_max_position_embeddings=160
    )
    with LLM(tmp_path, **OPTIONS) as llm:
        found = compare(model, llm)
    assert found.num_equal == found.num_tokens
    with pytest.raises(ValueError, match=r"longrope.* beyond 160 tokens.* set it to at most 160"):
        LLM(tmp_path, **OPTIONS | {"max_model_len": 161})
    with LLM(tmp_path, **OPTIONS | {"max_model_len": None}) as llm:
        assert llm.engine.config.max_model_len == 160


# ---- whose code


def test_a_native_family_through_transformers_code_is_a_second_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random(tmp_path)
    said = {}
    for choice in ("auto", "nanovllm", "transformers"):
        with caplog.at_level(logging.WARNING), LLM(tmp_path, model_impl=choice, **OPTIONS) as llm:
            said[choice] = generate(llm)
        lines = [record.message for record in caplog.records if "transformers' code" in record.message]
        assert len(lines) == (choice == "transformers")
    assert said["auto"] == said["nanovllm"] == said["transformers"]
    assert lines == ["Qwen3ForCausalLM runs through transformers' code: 19 of 20 modules are ours"]


def test_numbers_that_are_not_finite_and_counts_that_are_no_numbers_are_refused() -> None:
    """Whatever their names are, and before a model is made of them."""
    known = {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    assert read_values(known, transformers.GPT2Config, "it").hidden_size == 32
    for value in (math.nan, math.inf, -math.inf):
        for changes in ({"layer_norm_epsilon": value}, {"any": {"name": value}}):
            with pytest.raises(ValueError, match=f"is {value}; it must be finite"):
                read_values(known | changes, transformers.GPT2Config, "it")
    for count in ("7", [3], True, 7.5, 0):
        with pytest.raises(ValueError, match=r"n_positions is .* must be a whole number from 1"):
            read_values(known | {"max_position_embeddings": count}, transformers.GPT2Config, "it")


def test_nanovllm_s_code_alone_refuses_what_it_lacks(tmp_path: Path) -> None:
    save_any(tmp_path, "Gemma3ForCausalLM")
    with pytest.raises(ValueError, match=r'supported are: Qwen3ForCausalLM.*; model_impl="auto" also runs'):
        LLM(tmp_path, model_impl="nanovllm", **OPTIONS)
    with pytest.raises(ValueError, match="model_impl"):
        LLM(tmp_path, model_impl="torch", **OPTIONS)


def test_estimate_and_doctor_say_whose_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nanovllm.apps.cli import main
    from nanovllm.apps.doctor import describe

    save_any(tmp_path / "gemma", "Gemma3ForCausalLM")
    for arguments, code in (
        (["tiny-qwen3"], "natively"),
        (["tiny-qwen3", "--model-impl", "transformers"], "through transformers' code; 51 of 52 modules are ours"),
        ([str(tmp_path / "gemma")], "through transformers' code; 23 of 26 modules are ours"),
    ):
        assert main(["estimate", *arguments, "--device", "cpu"]) == 0
        assert f"  runs                            {code}\n" in capsys.readouterr().out
    assert "  runs                 natively\n" in describe("tiny-qwen3")
    assert "  runs                 through transformers' code; 23 of 26" in describe(str(tmp_path / "gemma"))
    transformers.FalconH1Config(num_hidden_layers=2, hidden_size=64, mamba_d_ssm=64, mamba_n_heads=4).save_pretrained(
        tmp_path / "h1"
    )
    edit_json(tmp_path / "h1" / "config.json", architectures=["FalconH1ForCausalLM"])
    for command in (["doctor"], ["estimate", "--device", "cpu"]):
        assert main([*command, str(tmp_path / "h1")]) == 2
        assert "keeps a state from token to token" in capsys.readouterr().err


# ---- features


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return request.param, folder, save_any(folder, request.param)


@pytest.mark.parametrize("method", ["ngram", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_drafts_change_no_token(saved: tuple[str, Path, Any], method: str) -> None:
    _, folder, model = saved
    drafts = {"method": "ngram"} if method == "ngram" else {"model": str(folder)}
    with LLM(folder, speculative_config={**drafts, "num_speculative_tokens": 3}, **OPTIONS) as llm:
        found = compare(model, llm)
        assert llm.stats()["num_accepted_tokens"] or method == "ngram"  # random text repeats little
    assert found.num_equal == found.num_tokens


def test_int8_says_the_same_in_torch_and_in_cpp(saved: tuple[str, Path, Any]) -> None:
    folder = saved[1]
    options = OPTIONS | {"quantization": "int8", "kv_cache_dtype": "int8"}
    said = []
    for backend in ("torch", "cpu"):
        with LLM(folder, **options | {"attention_backend": backend}) as llm:
            said.append(generate(llm))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CHECKPOINTS]
)
def test_a_quantised_checkpoint_says_what_its_values_mean(name: str, tmp_path: Path) -> None:
    save_any(tmp_path / "model", "OlmoeForCausalLM")
    quantised, means = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS[name])
    assert run(quantised) == run(means)


def save_published(folder: Path, target: Path) -> tuple[Path, Path]:
    """Copy a small gpt-oss twice: with random experts in MXFP4, and with what int8 makes of these. Return both."""
    rounded: dict[str, Tensor] = {}

    def pack(name: str, tensor: Tensor) -> dict[str, Tensor]:
        values = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        tensors = {name: tensor}
        if tensor.dim() == 3:
            torch.manual_seed(tensor.shape[1])
            blocks = torch.randint(256, (*values.shape[:2], values.shape[2] // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 125, blocks.shape[:3], dtype=torch.uint8)
            tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        is_matrix = tensor.dim() == 3 or name.endswith(("_proj.weight", "embed_tokens.weight"))
        values = round_rows(values) if is_matrix else values
        rounded[name] = values.transpose(1, 2) if tensor.dim() == 3 else values
        return tensors

    published = save_with(folder, target / "published", pack)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    edit_json(published / "config.json", quantization_config=settings)
    return published, save_with(folder, target / "rounded", lambda name, _: {name: rounded[name]})


def test_gpt_oss_runs_as_it_is_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_any(tmp_path / "model", "GptOssForCausalLM")
    published, rounded = save_published(tmp_path / "model", tmp_path)
    quantised = transformers.Mxfp4Config(dequantize=True)
    model = transformers.GptOssForCausalLM.from_pretrained(published, quantization_config=quantised).float().eval()
    with LLM(published, **OPTIONS) as llm:
        found = compare(model, llm)
        assert found.num_equal == found.num_tokens
        assert found.worst < 1e-3
        for ours, theirs in zip(llm.engine.runner.model.body.layers, model.model.layers, strict=True):
            assert torch.equal(ours.mlp.experts.gate_up.transpose(1, 2), theirs.mlp.experts.gate_up_proj)
            assert torch.equal(ours.mlp.experts.down.transpose(1, 2), theirs.mlp.experts.down_proj)
    assert "weights of 4 bits (mxfp4) become float32" in caplog.text
    for backend in ("torch", "cpu"):
        options = OPTIONS | {"attention_backend": backend, "quantization": "int8"}
        with LLM(published, **options) as coded, LLM(rounded, **options | {"quantization": None}) as meant:
            assert generate(coded) == generate(meant)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_new_weights_are_those_of_a_fresh_engine(saved: tuple[str, Path, Any], backend: str, tmp_path: Path) -> None:
    name, folder, _ = saved
    other = save_any(tmp_path, name, seed=1)
    with LLM(folder, **OPTIONS | {"attention_backend": backend}) as llm:
        before = generate(llm)
        llm.load_weights(load_file(tmp_path / "model.safetensors").items())
        found = compare(other, llm)
        assert found.num_equal == found.num_tokens
        llm.load_weights(load_file(folder / "model.safetensors").items())
        assert generate(llm) == before


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_new_weights_of_rounded_experts_bring_their_biases(backend: str, tmp_path: Path) -> None:
    """The biases of experts are matrices by their shape, and no codes are made of them."""

    def draw_biases(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: torch.randn_like(tensor) if name.endswith("_proj_bias") else tensor}

    save_any(tmp_path / "old", "GptOssForCausalLM")
    new = save_with(tmp_path / "old", tmp_path / "new", draw_biases)
    options = OPTIONS | {"attention_backend": backend, "quantization": "int8"}
    with LLM(tmp_path / "old", **options) as llm, LLM(new, **options) as fresh:
        before = generate(llm)
        llm.load_weights(load_file(new / "model.safetensors").items())
        assert generate(llm) == generate(fresh) != before


def test_a_draft_on_several_ranks_is_refused(tmp_path: Path) -> None:
    """A draft model has the options of its target."""
    save_any(tmp_path / "draft", "Gemma3ForCausalLM")
    save_any(tmp_path / "target", "Qwen3ForCausalLM")
    drafts = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=r"on one rank: leave tensor_parallel_size \(2\)"):
        LLM(tmp_path / "target", **OPTIONS, tensor_parallel_size=2, speculative_config=drafts)


def test_who_sleeps_wakes_up_as_before(saved: tuple[str, Path, Any]) -> None:
    with LLM(saved[1], **OPTIONS) as llm:
        before = generate(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert generate(llm) == before


@torch.inference_mode()
def test_vectors_are_transformers_hidden_states(saved: tuple[str, Path, Any]) -> None:
    _, folder, model = saved
    prompts = draw_prompts([30, 5, 70])
    with LLM(folder, **OPTIONS) as llm:
        vectors = llm.embed(prompts, normalize=False, use_tqdm=False)
    for prompt, vector in zip(prompts, vectors, strict=True):
        expected = model.get_decoder()(torch.tensor([prompt]), use_cache=False)[0][0, -1]
        torch.testing.assert_close(torch.tensor(vector.embedding), expected, rtol=1e-3, atol=1e-3)


def test_an_adapter_is_merged_or_refused_by_the_matrix(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    name, folder, _ = saved
    model = getattr(transformers, name).from_pretrained(folder).float().eval()
    targets = {"GPT2LMHeadModel": ["c_attn"], "DeepseekV3ForCausalLM": ["o_proj"]}.get(name, ["q_proj", "o_proj"])
    merged = save_adapter(model, tmp_path, target_modules=targets)
    if name == "GPT2LMHeadModel":
        with pytest.raises(ValueError, match="'fan_in_fan_out' is not supported"):
            LLM(folder, lora=str(tmp_path), **OPTIONS)
        return
    with LLM(folder, lora=str(tmp_path), **OPTIONS) as llm:
        found = compare(merged, llm)
    assert found.num_equal == found.num_tokens


def test_random_weights_and_replicas(saved: tuple[str, Path, Any]) -> None:
    _, folder, _ = saved
    with LLM(folder, load_format="dummy", **OPTIONS) as llm:
        assert all(len(tokens) == 8 for tokens in generate(llm))


@pytest.mark.slow
def test_replicas_say_the_same(tmp_path: Path) -> None:
    save_any(tmp_path, "Gemma3ForCausalLM")
    with LLM(tmp_path, **OPTIONS) as llm:
        alone = generate(llm)
    with LLM(tmp_path, data_parallel_size=2, **OPTIONS) as llm:
        assert generate(llm) == alone


# ---- what a family here lacks

LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 160},
    **{"short_factor": [1.5] * 16, "long_factor": [4.0] * 16},
}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LACKING: dict[str, tuple[str, dict[str, Any], str]] = {
    "biases of MLPs": ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias is true"),
    "activation": ("Qwen3ForCausalLM", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu is supported"),
    "activation of experts": (
        "Qwen3MoeForCausalLM",
        {**CASES["Qwen3MoeForCausalLM"].changes, "hidden_act": "relu"},
        "'relu'",
    ),
    "rope type": ("LlamaForCausalLM", {"rope_parameters": LONGROPE}, "rope type is 'longrope'"),
    "partial rotation": ("LlamaForCausalLM", {"rope_parameters": HALF}, "partial_rotary_factor other than 1"),
    "windows": ("MistralForCausalLM", {"sliding_window": 20, "layer_types": ["full_attention"] * 2}, "layer_types"),
    "a key": ("Qwen2ForCausalLM", {"head_dim": ..., "chunk_size_feed_forward": 2}, "does not read chunk_size_feed"),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_a_family_here_lacks_runs_by_transformers_code(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, changes, reason = LACKING[case]
    model = save_any(tmp_path, name, **changes)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert compare(model, llm).num_equal == 216
    (line,) = [record.message for record in caplog.records if "runs through" in record.message]
    assert f"; this engine's own code does not run it: {tmp_path}/config.json: " in line and reason in line
    with pytest.raises(ValueError, match=reason):
        LLM(tmp_path, **OPTIONS, model_impl="nanovllm")


BOTH_FAIL: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ranks": ({}, {"tensor_parallel_size": 2}, r"leave tensor_parallel_size \(2\) at 1"),
    "stages": ({}, {"pipeline_parallel_size": 2}, r"leave pipeline_parallel_size \(2\) at 1"),
    "a format": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {},
        "'bitsandbytes': this is not supported",
    ),
    "a rope type": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "is dynamic"),
}


@pytest.mark.parametrize("case", BOTH_FAIL)
def test_what_neither_code_runs_is_refused_with_both_reasons(case: str, tmp_path: Path) -> None:
    changes, options, message = BOTH_FAIL[case]
    save_any(tmp_path, "LlamaForCausalLM", mlp_bias=True)
    edit_json(tmp_path / "config.json", **changes)
    both = rf"{message}.*; this engine's own code does not run the model: .*/config\.json: mlp_bias is true"
    with pytest.raises(ValueError, match=both):
        LLM(tmp_path, **OPTIONS | options)


def test_a_value_that_no_model_can_have_is_refused_whosever_code_would_run(tmp_path: Path) -> None:
    for wrong in ({"rms_norm_eps": -1.0}, {"num_key_value_heads": 3}, {"head_dim": 31}):
        save_config(tmp_path, transformers.LlamaConfig(**SMALL), "LlamaForCausalLM", mlp_bias=True, **wrong)
        with pytest.raises(ValueError, match=r"config\.json: (rms_norm_eps|4 attention heads)|head_dim.=31"):
            LLM(tmp_path, **OPTIONS, load_format="dummy")


# ---- names


SPELLINGS: dict[str, tuple[str, list[str]]] = {
    "PhiMoE": ("PhimoeForCausalLM", ["PhiMoEForCausalLM"]),
    "another stem": ("Gemma2ForCausalLM", ["MyGemmaForCausalLM"]),
    "small letters": ("Phi3ForCausalLM", ["phi3forcausallm"]),
    "a native family": ("LlamaForCausalLM", ["LLaMAForCausalLM"]),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_model_type_decides_however_the_architecture_is_spelled(case: str, tmp_path: Path) -> None:
    name, spelling = SPELLINGS[case]
    model = save_any(tmp_path, name)
    edit_json(tmp_path / "config.json", architectures=spelling)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert compare(model, llm).num_equal == 216
        assert (find_family(llm.engine.runner.hf_config) is OTHERS) == (not case.startswith("a native"))


@pytest.mark.parametrize("name", ["Phi3ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3ForCausalLM"])
def test_a_folder_s_own_code_does_not_run_where_transformers_has_the_class(name: str, tmp_path: Path) -> None:
    model = save_any(tmp_path, name)
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    marker = tmp_path / "ran"
    for file in ("own.py", "modeling_own.py", "configuration_own.py", "custom_generate/generate.py"):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    own = {f"Auto{kind}": f"own.{kind}" for kind in ("Config", "Model", "ModelForCausalLM")}
    edit_json(tmp_path / "config.json", auto_map={**own, "AutoTokenizer": "someone/else"}, trust_remote_code=True)
    settings = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"custom_generate": "custom_generate"}))
    with LLM(tmp_path, **OPTIONS) as llm:
        assert compare(model, llm).num_equal == 216
        assert llm.engine.tokenizer is not None
    assert not marker.exists()


# ---- refusals


def save_config(folder: Path, config: Any, architecture: str, **changes: Any) -> Path:
    config.save_pretrained(folder)
    edit_json(folder / "config.json", architectures=[architecture], **changes)
    return folder


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
V4 = {
    **{
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 48,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_head_dim": 16,
    },
    **{"index_n_heads": 4, "index_topk": 16, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_hash_layers": 0},
}
REFUSED: dict[str, tuple[Callable[[], Any], str, dict[str, Any], dict[str, Any], str]] = {
    "a state beside attention": (
        lambda: transformers.FalconH1Config(**SMALL, mamba_d_ssm=64, mamba_n_heads=4),
        "FalconH1ForCausalLM",
        {},
        {},
        r"FalconH1ForCausalLM cannot run .*mamba.*keeps a state from token to token",
    ),
    "a state in place of attention": (
        lambda: transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
        "Lfm2ForCausalLM",
        {},
        {},
        "keeps a state from token to token",
    ),
    "keys of many tokens": (
        lambda: transformers.DeepseekV4Config(**SMALL, **V4, compress_ratios=[0, 128]),
        "DeepseekV4ForCausalLM",
        {},
        {},
        "layers.1.self_attn.compressor compresses keys and values of many tokens",
    ),
    "a cache of its own": (
        lambda: transformers.DeepseekV4Config(**SMALL, **V4, compress_ratios=[0, 0]),
        "DeepseekV4ForCausalLM",
        {},
        {},
        "it has a cache of its own .DeepseekV4",
    ),
    "attention of its own": (
        lambda: transformers.BloomConfig(n_layer=2, n_head=4, hidden_size=64, vocab_size=500),
        "BloomForCausalLM",
        {},
        {},
        "BloomForCausalLM cannot run through transformers' code: its layers compute attention themselves",
    ),
    "angles that grow": (
        lambda: transformers.HunYuanDenseV1Config(
            **SMALL, head_dim=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "HunYuanDenseV1ForCausalLM",
        {},
        {},
        "its rope type is dynamic: a sequence's angles depend on others",
    ),
    "positions of its own": (
        lambda: transformers.BartConfig(
            **SMALL, encoder_layers=2, decoder_layers=2, is_decoder=True, is_encoder_decoder=False
        ),
        "BartForCausalLM",
        {},
        {},
        "BartForCausalLM cannot run through transformers' code: its code counts the positions of tokens itself",
    ),
    "positions after 0": (
        lambda: transformers.RobertaConfig(**SMALL, is_decoder=True),
        "RobertaForCausalLM",
        {},
        {},
        "RobertaForCausalLM cannot run through transformers' code: .* or begins to count after 0",
    ),
    "forward reads the device": (
        lambda: transformers.JetMoeConfig(**SMALL),
        "JetMoeForCausalLM",
        {},
        {},
        "JetMoeForCausalLM cannot run through transformers' code: its code reads the device while it computes",
    ),
    "code from the model's folder": (
        lambda: transformers.Gemma3TextConfig(**SMALL),
        "Gemma3ForCausalLM",
        {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}, "model_type": "mine"},
        {},
        "model_type 'mine' is not in transformers' table, and auto_map.*code from models is never run here",
    ),
    "no causal model": (
        lambda: transformers.Gemma3TextConfig(**SMALL),
        "Gemma3TextForSequenceClassification",
        {},
        {},
        "names 'Gemma3TextForSequenceClassification'; supported are: .* table of causal models",
    ),
    "a model that transformers lacks": (
        lambda: transformers.Gemma3TextConfig(**SMALL),
        "NewForCausalLM",
        {"model_type": "new"},
        {},
        "names 'NewForCausalLM'; supported are: .* causal models; there model_type 'new' is not",
    ),
    "the architecture of another model": (
        lambda: transformers.Gemma3TextConfig(**SMALL),
        "CohereForCausalLM",
        {},
        {},
        "names 'CohereForCausalLM'; .* there model_type 'gemma3_text' is Gemma3ForCausalLM",
    ),
    "values that transformers refuses": (
        lambda: transformers.Gemma3TextConfig(**SMALL),
        "Gemma3ForCausalLM",
        {"hidden_size": "wide"},
        {},
        "is not a valid configuration of 'gemma3_text'",
    ),
    "a quantised checkpoint of a format that is not read": (
        lambda: transformers.Gemma3TextConfig(**SMALL),
        "Gemma3ForCausalLM",
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {},
        "'bitsandbytes': this is not supported: use the original checkpoint",
    ),
    "ranks that share layers": (
        lambda: transformers.Gemma3TextConfig(**SMALL),
        "Gemma3ForCausalLM",
        {},
        {"tensor_parallel_size": 2},
        r"on one rank: leave tensor_parallel_size \(2\) at 1",
    ),
    "stages of a pipeline": (
        lambda: transformers.Gemma3TextConfig(**SMALL),
        "Gemma3ForCausalLM",
        {},
        {"pipeline_parallel_size": 2},
        r"on one rank: leave pipeline_parallel_size \(2\) at 1",
    ),
    "a head too large for the kernels": (
        lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=512),
        "Gemma3ForCausalLM",
        {},
        {"attention_backend": "cpu"},
        "it has kernels for head_dim of .*, not 512",
    ),
    "attention within chunks": (
        lambda: transformers.Llama4TextConfig(**SMALL, head_dim=16, attention_chunk_size=32),
        "Llama4ForCausalLM",
        {},
        {},
        "Llama4ForCausalLM cannot .*: its layers attend within chunks of 32 tokens, not in windows",
    ),
    "an indexer": (
        lambda: transformers.DeepseekV32Config(**SMALL),
        "DeepseekV32ForCausalLM",
        {},
        {},
        r"DeepseekV32ForCausalLM cannot .*: it has sparse attention with an indexer \(model\.layers\.0\.",
    ),
    "another model with an indexer": (
        lambda: transformers.GlmMoeDsaConfig(**SMALL),
        "GlmMoeDsaForCausalLM",
        {},
        {},
        "GlmMoeDsaForCausalLM cannot .*: it has sparse attention with an indexer",
    ),
    "tables of whole numbers": (
        lambda: transformers.DeepseekV4Config(**SMALL),
        "DeepseekV4ForCausalLM",
        {},
        {},
        r"its checkpoints have a table of torch\.int64, model\..*tid2eid, and floats alone are read",
    ),
    "a model_type that transformers lacks, without code": (
        lambda: transformers.DeepseekV3Config(**SMALL),
        "DeepseekV3ForCausalLM",
        {"model_type": "kimi_k2"},
        {},
        "names 'DeepseekV3ForCausalLM'; .* there model_type 'kimi_k2' is not",
    ),
    "a scale that is no real number": (
        lambda: transformers.Gemma2Config(**SMALL, query_pre_attn_scalar=-1),
        "Gemma2ForCausalLM",
        {},
        {},
        "self_attn computes with a complex number",
    ),
    "two-way attention": (
        lambda: transformers.Gemma3TextConfig(**SMALL, use_bidirectional_attention=True),
        "Gemma3ForCausalLM",
        {},
        {},
        "its masks are neither causal nor sliding windows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_at_load_in_a_sentence(name: str, tmp_path: Path) -> None:
    make, architecture, changes, options, message = REFUSED[name]
    save_config(tmp_path, make(), architecture, **changes)
    with pytest.raises(ValueError, match=message) as refused:
        LLM(tmp_path, **OPTIONS | {"load_format": "dummy"} | options)
    assert "\n" not in str(refused.value)


NO_NUMBERS: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("Gemma2ForCausalLM", {name: value}, f"{name} is .*; it must be (above 0 and )?finite")
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
        for value in (math.nan, math.inf, -math.inf, -50.0, 0.0, 1e-40, 1e39)
    ),
    ("LagunaForCausalLM", {"moe_router_logit_softcapping": -1.0}, "moe_router_logit_softcapping is -1.0"),
    *(
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": value}}, "rope_theta")
        for value in (0.0, math.nan, math.inf, -1e4)
    ),
    *(
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 0.0, **more}},
            "factors",
        )
        for kind, more in (
            ("linear", {}),
            ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
        )
    ),
    (
        "Gemma3ForCausalLM",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 0.0},
            }
        },
        "full_attention_inv_freq.* are not finite",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), NO_NUMBERS, ids=str)
def test_numbers_with_which_nothing_can_be_computed_are_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AnyDecoder(make_config(name, **changes))


def test_a_cap_of_0_that_a_class_has_by_itself_means_none() -> None:
    assert make_config("LagunaForCausalLM").moe_router_logit_softcapping == 0.0
    AnyDecoder(make_config("LagunaForCausalLM"))


def test_a_large_mixture_is_refused_if_and_only_if_the_kernels_do_not_compute_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_any(tmp_path, "OlmoeForCausalLM")
    with monkeypatch.context() as patch:
        patch.setattr(layers, "MOST_COPIED_EXPERTS", 0)
        last_built.clear()
        with LLM(tmp_path, **OPTIONS) as llm:
            assert compare(model, llm).num_equal == 216
    monkeypatch.setattr("nanovllm.features.families.any_causal.experts.is_mixture", lambda _: False)
    last_built.clear()
    with LLM(tmp_path, **OPTIONS) as llm:
        assert compare(model, llm).num_equal == 216  # 8 experts, by transformers' code
    monkeypatch.setattr(layers, "MOST_COPIED_EXPERTS", 7)
    last_built.clear()
    with pytest.raises(ValueError, match=r"its mixture of 8 experts.*more than 7 experts take too much memory"):
        LLM(tmp_path, **OPTIONS)


def test_padding_has_no_expert_and_disturbs_no_token() -> None:
    """With biases, which each pair takes from its expert."""
    torch.manual_seed(0)
    theirs = GptOssExperts(make_config("GptOssForCausalLM"))
    ours = GroupedExperts(theirs, Backend())
    for _, target in ours.weight_targets("", ()):
        target.view.normal_()
    x = torch.randn(3, theirs.hidden_size)
    experts = torch.tensor([[0, 1], [theirs.num_experts] * 2, [theirs.num_experts - 1, 0]])
    weights = torch.rand(3, 2)
    found = ours(x, experts, weights)
    assert torch.equal(found[[0, 2]], ours(x[[0, 2]], experts[[0, 2]], weights[[0, 2]]))


def test_a_stack_multiplies_what_each_call_gives_it() -> None:
    """Also if it is the tensor of the last call, which has other values by now."""
    matrices = [nn.Linear(4, size, bias=False) for size in (3, 2, 1)]
    stack = layers.Stack(matrices, ("q_proj", "k_proj", "v_proj"))
    stack.weight.copy_(torch.cat([matrix.weight for matrix in matrices]).detach())
    stack.backend = Backend()
    last = layers.LastProduct()
    shares = [layers.Share(stack, number, last) for number in range(3)]
    x = torch.randn(5, 4)
    for order in ((0, 1, 2), (2, 0, 1)):
        for number in order:
            torch.testing.assert_close(shares[number](x), matrices[number](x))
        x.mul_(-2)
    other = torch.randn(2, 4)
    for number, given in ((0, x), (0, other), (1, x), (1, other)):  # in any order
        torch.testing.assert_close(shares[number](given), matrices[number](given))


def test_a_model_is_built_once_for_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_any(tmp_path, "Gemma3ForCausalLM")
    counted: list[str] = []
    run_dry = AnyDecoder._run_dry
    monkeypatch.setattr(AnyDecoder, "_run_dry", lambda *given: counted.append("built") or run_dry(*given))
    for dtype in ("float32", "bfloat16"):
        last_built.clear()
        counted.clear()
        edit_json(tmp_path / "config.json", dtype=dtype)
        with LLM(tmp_path, **OPTIONS | {"dtype": dtype}) as llm:
            assert next(llm.engine.runner.model.parameters()).dtype == getattr(torch, dtype)
        assert counted == ["built"]


@contextmanager
def forgetting(num_tokens: int) -> Iterator[list[attend.AttentionLayer]]:
    with attend.recording(num_tokens) as calls:
        yield calls
        calls.pop()


def test_a_layer_that_does_not_attend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_any(tmp_path, "LlamaForCausalLM")
    monkeypatch.setattr(decoder, "recording", forgetting)
    last_built.clear()
    with pytest.raises(ValueError, match=r"cannot run .*: 1 of 2 layers call transformers' attention function"):
        LLM(tmp_path, **OPTIONS | {"model_impl": "transformers"})


class Compresses(LlamaAttention):
    """Adds a key for each 100 tokens, if there are so many. The first one is as good as any: no number is looked at."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **named: Any) -> Any:
        count = hidden_states.shape[1] // 100
        own = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]

        def attend_more(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
            return own(module, q, torch.cat((k[:, :, :count], k), 2), torch.cat((v[:, :, :count], v), 2), mask, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS, self.config._attn_implementation, attend_more)
            return super().forward(hidden_states, position_embeddings, attention_mask, **named)


class Slides(LlamaAttention):
    """Has a cap in long texts alone."""

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        if hidden_states.shape[1] > 512:
            named["softcap"] = 30.0
        return super().forward(hidden_states, *given, **named)


class CutsPieces(LlamaAttention):
    """Attends within pieces of 100 tokens."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **named: Any) -> Any:
        num_pieces = max(hidden_states.shape[1] // 100, 1)
        pieces = hidden_states.view(num_pieces, -1, hidden_states.shape[2])
        angles = tuple(part[:, : pieces.shape[1]] for part in position_embeddings)
        attended, weights = super().forward(pieces, angles, attention_mask, **named)
        return attended.reshape(hidden_states.shape), weights


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Compresses, "in a text of 600 tokens its attention has 606 queries, keys or values"),
        (Slides, "ask for another attention in a long text than in a short one"),
        (CutsPieces, "cut a text into pieces"),
    ],
)
def test_what_only_long_texts_show_is_refused(kind: type, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them does in a short text what Llama's attention does."""
    monkeypatch.setattr(modeling_llama, "LlamaAttention", kind)
    AnyDecoder(make_config("LlamaForCausalLM", max_position_embeddings=64))
    with pytest.raises(ValueError, match=message):
        AnyDecoder(make_config("LlamaForCausalLM", max_position_embeddings=2048))


def test_a_head_or_an_embedding_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(torch.nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + 1

    with pytest.raises(ValueError, match=r"its embedding \(Shifted\) is not a table of rows"):
        layers.find_scale(Shifted(8, 16))
    save_any(tmp_path, "LlamaForCausalLM")

    def replace_head(model: Any) -> torch.nn.Module:
        model.lm_head = torch.nn.Identity()
        return model.lm_head

    monkeypatch.setattr(transformers.LlamaForCausalLM, "get_output_embeddings", replace_head)
    last_built.clear()
    with pytest.raises(ValueError, match="its embedding is Embedding and its head Identity"):
        LLM(tmp_path, **OPTIONS | {"model_impl": "transformers"})


def test_a_tensor_that_a_checkpoint_would_have_to_compute_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_any(tmp_path, "LlamaForCausalLM")
    monkeypatch.setattr(
        transformers.core_model_loading,
        "revert_weight_conversion",
        lambda _, tensors: {name: tensor.clone() for name, tensor in tensors.items()},
    )
    with pytest.raises(ValueError, match="in checkpoints is computed from several tensors, which is not supported"):
        LLM(tmp_path, **OPTIONS | {"model_impl": "transformers"})


def test_another_transformers_fails_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_config(tmp_path, transformers.Gemma3TextConfig(**SMALL), "Gemma3ForCausalLM")
    monkeypatch.delattr(transformers.core_model_loading, "revert_weight_conversion")
    missing = r"transformers 5.* has no transformers\.core_model_loading\.revert_weight_conversion, .* 5\.8 to 5\.24"
    with pytest.raises(ValueError, match=missing):
        LLM(tmp_path, **OPTIONS)
    monkeypatch.setattr(config, "PRIVATE", ("transformers.no_such_module.name",))
    with pytest.raises(ValueError, match=r"has no transformers\.no_such_module\.name"):
        LLM(tmp_path, **OPTIONS)


def call(mask: Any = None, module: torch.nn.Module | None = None, **arguments: Any) -> None:
    heads = torch.zeros(1, 2, 2, 8)
    mask = attend.Mask(None) if mask is None else mask
    attend.record(module or torch.nn.Module(), heads, heads, heads, mask, **arguments)


def test_a_call_that_asks_for_something_unknown_is_refused() -> None:
    module = torch.nn.Module()
    with attend.recording(2) as calls:
        call(dropout=0.0, position_ids=torch.zeros(1), softcap=None, alibi=None)
        with pytest.raises(ValueError, match="takes alibi, which this engine does not know"):
            call(alibi=torch.zeros(2))
        with pytest.raises(ValueError, match="has a mask that transformers' table of masks does not make"):
            call(torch.zeros(2, 2))
        with pytest.raises(ValueError, match="masks show the last all tokens, and its attention asks for 4"):
            call(sliding_window=4)
        with pytest.raises(ValueError, match="is not causal"):
            call(is_causal=False)
        call(module=module)
        with pytest.raises(ValueError, match="share a module"):
            call(module=module)
    assert len(calls) == 2


def test_masks_are_asked_what_they_show() -> None:
    causal = masking_utils.causal_mask_function

    def ask(function: Callable[..., Any]) -> attend.Mask:
        with attend.recording(2):
            return attend.describe_mask(mask_function=function)

    assert ask(causal) == attend.Mask(None)
    window = masking_utils.and_masks(masking_utils.sliding_window_overlay(300), causal)
    assert ask(window) == attend.Mask(300)
    chunked = masking_utils.and_masks(masking_utils.chunked_overlay(256, torch.zeros(1, dtype=torch.long)), causal)
    assert "chunks" in ask(chunked).refusal
    far = attend.FAR
    for size in (1, 2, far - 12345, far - 5000, far - 1, far, far + 1, far + 12345, 1 << 24, 1 << 30):
        window = masking_utils.and_masks(masking_utils.sliding_window_overlay(size), causal)
        assert ask(window) == attend.Mask(size), size
    for size in (256, far - 1, far, far + 1, 1 << 24, 1 << 30):
        chunks = masking_utils.chunked_overlay(size, torch.zeros(1, dtype=torch.long))
        assert "chunks" in ask(masking_utils.and_masks(chunks, causal)).refusal, size
    assert "neither causal nor sliding" in ask(masking_utils.bidirectional_mask_function).refusal
    with pytest.raises(ValueError, match="parts of a mask"):
        attend.Mask(None)[:, :, 1:]


# ---- the proof at load

REAL = attend.AttentionLayer.read
REAL_FORWARD = AnyDecoder.forward


def break_scale(layer: Any, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    return REAL(layer, q, 1.1 * scale, sinks)


def break_cap(layer: Any, *arguments: Any) -> Tensor:
    layer.variant = None if layer.variant is None else layer.variant._replace(softcap=None)
    return REAL(layer, *arguments)


def break_sinks(layer: Any, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    layer.variant = None if layer.variant is None else layer.variant._replace(sinks=None)
    return REAL(layer, q, scale)


def break_shared_keys(layer: Any, *arguments: Any) -> Tensor:
    if layer.source != layer.number:
        layer.source = 1 - layer.number % 2  # the other of the two that are shared
    return REAL(layer, *arguments)


def break_far_scale(layer: Any, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Compute with another scale where a sequence has more than 128 tokens."""
    is_far = int(layer.step.inputs[layer.form].seq_lens.max()) > 128
    return REAL(layer, q, 1.5 * scale if is_far else scale, sinks)


def forward_from_zero(model: AnyDecoder, inputs: Any, caches: Any) -> Tensor:
    """Compute a step whose positions begin with 0, whatever was computed before."""
    positions = torch.arange(len(inputs.positions), dtype=torch.int32)
    return REAL_FORWARD(model, replace(inputs, positions=positions), caches)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Gemma2ForCausalLM", break_scale),
        ("Gemma2ForCausalLM", break_far_scale),
        ("Gemma2ForCausalLM", break_cap),
        ("GptOssForCausalLM", break_sinks),
        ("Gemma3nForCausalLM", break_shared_keys),
        ("Gemma2ForCausalLM", forward_from_zero),
        ("OPTForCausalLM", forward_from_zero),
    ],
)
def test_a_model_whose_attention_is_wrong_is_refused_at_load(
    name: str, wrong: Callable[..., Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_any(tmp_path, name)
    monkeypatch.setattr(proof, "TESTED", frozenset())
    LLM(tmp_path, **OPTIONS).close()
    if wrong is forward_from_zero:
        monkeypatch.setattr(AnyDecoder, "forward", wrong)
    else:
        monkeypatch.setattr(attend.AttentionLayer, "read", wrong)
    with pytest.raises(ValueError, match=r"gives other numbers with this engine's attention.* may differ by 0\.005"):
        LLM(tmp_path, **OPTIONS)
    monkeypatch.setattr(proof, "TESTED", frozenset([name]))
    LLM(tmp_path, **OPTIONS).close()  # the test of tokens refuses it


def test_the_proof_compares_with_the_positions_that_transformers_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RoBERTa's first position is the one after the pad token's id."""
    config = transformers.RobertaConfig(**SMALL, is_decoder=True, initializer_range=0.5)
    model = transformers.RobertaForCausalLM(config)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.decoder.bias"] = tensors["lm_head.bias"].clone()  # as older versions of transformers save it
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(decoder, "refuse_own_positions", lambda body: None)
    last_built.clear()
    with pytest.raises(ValueError, match="gives other numbers with this engine's attention"):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.parametrize("place", ["transformers", "read"])
def test_a_text_that_cannot_be_computed_refuses_the_model(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise IndexError("a layer's own words")

    save_any(tmp_path, "GemmaForCausalLM")
    monkeypatch.setattr(proof, "TESTED", frozenset())
    if place == "read":
        monkeypatch.setattr(attend.AttentionLayer, "read", fail)
    else:
        monkeypatch.setattr(modeling_gemma, "eager_attention_forward", fail)
    with pytest.raises(ValueError, match=r"GemmaForCausalLM is not run, because no text .* a layer's own words"):
        LLM(tmp_path, **OPTIONS)
    monkeypatch.undo()
    LLM(tmp_path, **OPTIONS).close()


def test_a_machine_that_fails_at_the_proof_gets_its_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is not to blame if memory runs out or a compiler fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise CalledProcessError(1, ["gcc", "-shared"])

    save_any(tmp_path, "GemmaForCausalLM")
    monkeypatch.setattr(proof, "TESTED", frozenset())
    monkeypatch.setattr(attend.AttentionLayer, "read", fail)
    with pytest.raises(ValueError, match="Triton compiles a small C library"):
        LLM(tmp_path, **OPTIONS)


def test_a_config_keeps_whose_code_runs_it_when_it_travels(tmp_path: Path) -> None:
    save_any(tmp_path, "GraniteMoeHybridForCausalLM")
    data = json.loads((tmp_path / "config.json").read_text())
    config = load_model_config(data, "a file")
    sent = json.loads(config.to_json_string(use_diff=False))
    assert find_family(load_model_config(sent, "rank 0")) is OTHERS
