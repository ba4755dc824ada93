"""Qwen3.5-MoE, hybrids with experts and a shared expert, says token for token what transformers says."""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hybrids import save_hub_form, save_sparse_hybrid
from helpers.quantized import CHECKPOINTS, PLAIN, run, save_quantised, save_rounded
from helpers.tiny import CROWDED, draw_prompts, edit_json, logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.models.model_config import load_model_config
from nanovllm.models.sizes import Sizes

OPTIONS = {**CROWDED, "max_model_len": 320, "num_kvcache_blocks": 24}
LENGTHS = [1, 2, 3, 4, 5, 17, 63, 64, 65, 90, 130, 300]
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=30, logprobs=1)


def draw_changes(seed: int) -> dict[str, Any]:
    """Draw a small model: sizes, kinds of layers, experts, and how much of a head rotates."""
    draw = random.Random(seed)
    num_layers = draw.randrange(2, 5)
    kinds = ["full_attention", *draw.choices(["full_attention", "linear_attention"], k=num_layers - 1)]
    draw.shuffle(kinds)
    key_heads = draw.randrange(1, 4)
    kv_heads = draw.randrange(1, 3)
    num_experts = draw.choice([1, 2, 5, 8, 40])
    return {
        "seed": seed,
        "num_hidden_layers": num_layers,
        "layer_types": kinds,
        "hidden_size": draw.choice([48, 52, 64]),
        "num_attention_heads": kv_heads * draw.randrange(1, 4),
        "num_key_value_heads": kv_heads,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.randrange(1, 4),
        "linear_key_head_dim": draw.choice([10, 16]),
        "linear_value_head_dim": draw.choice([14, 32]),
        "linear_conv_kernel_dim": draw.randrange(2, 5),
        "num_experts": num_experts,
        "num_experts_per_tok": draw.randrange(1, min(num_experts, 8) + 1),
        "moe_intermediate_size": draw.choice([24, 32, 64]),
        "shared_expert_intermediate_size": draw.choice([16, 20, 48]),
        "tie_word_embeddings": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw.choice([1e4, 1e7]),
            "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
        },
    }


TIE = 1e-4
"""A chosen expert whose logit is above that of the next one by less may be another after a rounding: in float32 the
logits of a router differ by up to a few 1e-5."""


def check(model: PreTrainedModel, prompts: list[list[int]], outputs: list[Any]) -> None:
    """Fail unless every token is transformers' likeliest after those before it, with its log-probability.

    A few prompts are left out: those of which a token has a tie between experts.
    """
    num_checked = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output["token_ids"]
        margins: list[float] = []

        def measure(router: Any, _: Any, found: tuple[Tensor, ...], margins: list[float] = margins) -> None:
            if router.top_k < router.num_experts:
                highest = found[0].topk(router.top_k + 1).values
                margins.append(float((highest[:, -2] - highest[:, -1]).min()))

        routers = [module for module in model.modules() if isinstance(module, Qwen3_5MoeTopKRouter)]
        hooks = [router.register_forward_hook(measure) for router in routers]
        logits = logits_of(model, prompt + answer)[len(prompt) - 1 : -1]
        for hook in hooks:
            hook.remove()
        if min(margins, default=TIE) < TIE:
            continue
        num_checked += 1
        assert answer == logits.argmax(1).tolist(), len(prompt)
        ours = torch.tensor([float(entry[token]) for token, entry in zip(answer, output["logprobs"], strict=True)])
        torch.testing.assert_close(ours, logits.log_softmax(1).amax(1), atol=1e-3, rtol=0)
    assert num_checked >= 0.6 * len(prompts)


def serve(folder: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    with LLM(folder, **OPTIONS | options) as llm:
        return llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sparse_hybrid")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return save_sparse_hybrid(folder)


FAST = 2
"""Drawn models that are tested plainly; the others are slow tests."""


@pytest.mark.parametrize("seed", [*range(FAST), *(pytest.param(i, marks=pytest.mark.slow) for i in range(FAST, 20))])
def test_drawn_models_say_what_transformers_says(seed: int, tmp_path: Path) -> None:
    """They preempt, and compute long prompts in chunks."""
    model = save_sparse_hybrid(tmp_path, **draw_changes(seed))
    prompts = draw_prompts(LENGTHS, seed)
    for backend in ("torch", "cpu"):
        with LLM(tmp_path, **OPTIONS, attention_backend=backend) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert llm.stats()["num_preemptions"]
        check(model, prompts, outputs)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16_is(backend: str, tmp_path: Path) -> None:
    """Both round after each operator, at other places, and then some tokens have other experts. Means are compared."""
    errors: list[list[Tensor]] = [[], []]
    for seed in range(8):
        model = save_sparse_hybrid(tmp_path, **draw_changes(seed) | {"hidden_size": 64, "moe_intermediate_size": 32})
        prompts = draw_prompts([5, 60, 200], seed)
        with LLM(tmp_path, **OPTIONS | {"dtype": "bfloat16"}, attention_backend=backend) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        exact = [logits_of(model, prompt).log_softmax(1) for prompt in prompts]
        theirs = [logits_of(model.bfloat16(), prompt).log_softmax(1) for prompt in prompts]
        for prompt, output, right, rounded in zip(prompts, outputs, exact, theirs, strict=True):
            targets = torch.tensor(prompt[1:])[:, None]
            entries = zip(prompt[1:], output["prompt_logprobs"][1:], strict=True)
            ours = torch.tensor([float(entry[token]) for token, entry in entries])
            expected = right[:-1].gather(1, targets)[:, 0]
            errors[0].append((ours - expected).abs())
            errors[1].append((rounded[:-1].gather(1, targets)[:, 0] - expected).abs())
    of_ours, of_theirs = (float(torch.cat(some).median()) for some in errors)
    assert of_ours <= 1.25 * of_theirs


# ---- checkpoints


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with one for all experts of a layer, as the hub has them."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        num_experts = sum(name.startswith(f"{prefix}.experts.") for name in tensors) // 3
        gates, ups, downs = (
            [tensors[f"{prefix}.experts.{i}.{kind}_proj.weight"] for i in range(num_experts)]
            for kind in ("gate", "up", "down")
        )
        pairs = zip(gates, ups, strict=True)
        fused[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        fused[f"{prefix}.experts.down_proj"] = torch.stack(downs)
    return fused


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_both_forms_of_experts_load(quantization: str | None, tmp_path: Path) -> None:
    model = save_sparse_hybrid(tmp_path, tie_word_embeddings=False)
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    prompts = draw_prompts([1, 9, 60])
    outputs = serve(tmp_path, prompts, quantization=quantization)
    if quantization is None:
        check(model, prompts, outputs)
    rewrite(tmp_path, fuse)
    assert serve(tmp_path, prompts, quantization=quantization) == outputs


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_form_on_the_hub_loads(is_fused: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The text model is nested beside one for pictures, and beside a head that predicts several tokens."""
    model = save_hub_form(tmp_path, is_tied=False, has_experts=True)
    tensors = load_file(tmp_path / "model.safetensors")
    has_fused = "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
    assert "model.visual.patch_embed.proj.weight" in tensors
    rewrite(tmp_path, lambda found: (fuse(found) if is_fused > has_fused else found) | {"mtp.fc.weight": torch.ones(2)})
    prompts = draw_prompts([1, 9, 60])
    with caplog.at_level(logging.INFO, "nanovllm"):
        check(model, prompts, serve(tmp_path, prompts))
    (record,) = [record for record in caplog.records if "are not read" in record.message]
    assert "22 tensors are not read: model.visual.blocks.0.attn.proj.bias" in record.message


def save_packable(folder: Path) -> Path:
    """Write a model whose matrices have sizes that every format can pack. Two ranks can share it."""
    sizes = {"linear_num_value_heads": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    save_sparse_hybrid(folder, tie_word_embeddings=False, **sizes)
    return folder


@pytest.fixture(scope="module")
def packable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_packable(tmp_path_factory.mktemp("packable"))


@pytest.fixture(scope="module")
def plain_tokens(packable: Path) -> list[list[int]]:
    """The tokens of the packable model."""
    return run(packable)


@pytest.mark.parametrize(
    "name",
    [
        *("packed with zeros", "int8 w8a8", "fp8 blocks"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("awq", "gptq", "gptq desc_act", "fp8 rows")),
    ],
)
def test_quantised_checkpoints_say_what_their_values_say(
    name: str, packable: Path, plain_tokens: list[list[int]], tmp_path: Path
) -> None:
    quantised, means = save_quantised(packable, tmp_path, *CHECKPOINTS[name])
    expected = run(means)
    assert expected != plain_tokens
    for backend in ("torch", "cpu"):
        assert run(quantised, attention_backend=backend) == expected, backend


@pytest.mark.parametrize("name", ["packed 8 bits", "int8 w8a8", "fp8 rows"])
def test_routers_and_gates_may_be_quantised(name: str, packable: Path, tmp_path: Path) -> None:
    """They are multiplied with 16 or 32 bits, however they were stored."""
    quantised, means = save_quantised(packable, tmp_path, *CHECKPOINTS[name], plain=PLAIN[:-1])
    assert run(quantised) == run(means)


def test_int8_at_load_is_that_of_the_rounded_weights(
    packable: Path, plain_tokens: list[list[int]], tmp_path: Path
) -> None:
    """All but norms, convolutions, routers and the gates of shared experts is rounded."""
    expected = run(save_rounded(packable, tmp_path / "rounded"))
    assert expected != plain_tokens
    for backend in ("torch", "cpu"):
        assert run(packable, attention_backend=backend, quantization="int8") == expected, backend


def test_fused_experts_that_are_quantised_are_refused_by_name(tmp_path: Path) -> None:
    """No format stores them so but a few FP8 checkpoints; those with one tensor for each expert are read."""
    folder = save_packable(tmp_path / "model")
    edit_json(folder / "config.json", quantization_config=CHECKPOINTS["fp8 blocks"][0])

    def quantise(found: dict[str, Tensor]) -> dict[str, Tensor]:
        fused = fuse(found)
        stacks = {name: tensor for name, tensor in fused.items() if ".experts." in name}
        scales = {f"{name}_scale_inv": torch.ones(len(tensor), 8, 2) for name, tensor in stacks.items()}
        return fused | {name: tensor.to(torch.float8_e4m3fn) for name, tensor in stacks.items()} | scales

    rewrite(folder, quantise)
    with pytest.raises(
        ValueError, match=r"tensors that the model does not: model\.layers\.0\.mlp\.experts\.down_proj_s"
    ):
        run(folder)


def test_new_weights_come_in_either_form(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    other = save_sparse_hybrid(tmp_path, seed=1)
    prompts = draw_prompts([20, 60])
    forms = [load_file(tmp_path / "model.safetensors"), other.state_dict()]
    assert forms[0].keys() != forms[1].keys()
    for tensors in forms:
        for options in ({"attention_backend": "cpu"}, {"attention_backend": "cpu", "quantization": "int8"}):
            with LLM(folder, **OPTIONS | options) as llm:
                before = llm.generate(prompts, GREEDY, use_tqdm=False)
                llm.load_weights(tensors.items())
                assert llm.generate(prompts, GREEDY, use_tqdm=False) == serve(tmp_path, prompts, **options) != before


def test_embeddings_scores_and_sleep(folder: Path, model: PreTrainedModel) -> None:
    (prompt,) = draw_prompts([50])
    with LLM(folder, **OPTIONS) as llm:
        (score,) = llm.score([prompt], [[1, 2, 3]], use_tqdm=False)
        (embedding,) = llm.embed([prompt], use_tqdm=False)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            check(model, [prompt], llm.generate([prompt], GREEDY, use_tqdm=False))
    logits = logits_of(model, [*prompt, 1, 2, 3]).log_softmax(1)
    assert score["logprob"] == pytest.approx(sum(logits[49 + i, i + 1].item() for i in range(3)), abs=3e-3)
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    ours = torch.as_tensor(embedding["embedding"])
    torch.testing.assert_close(ours, torch.nn.functional.normalize(hidden, dim=0).detach(), atol=1e-4, rtol=0)


# ---- steps, ranks and kernels


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_of_any_length_carry_the_state_on(budget: int, folder: Path, model: PreTrainedModel) -> None:
    prompts = draw_prompts([1, 6, 7, 8, 65, 100 if budget == 1 else 300], seed=budget)
    check(model, prompts, serve(folder, prompts, max_num_batched_tokens=budget))


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_a_request_has_the_same_bits_in_any_company(
    dtype: str, quantization: str | None, folder: Path, model: PreTrainedModel
) -> None:
    """With the CPU kernels log-probabilities of prompts and outputs are equal: alone, together, preempted, chunked."""
    prompts = draw_prompts(LENGTHS[1:])
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20, logprobs=2, prompt_logprobs=1)

    def answer(**options: Any) -> list[tuple[Any, ...]]:
        ours = OPTIONS | {"attention_backend": "cpu", "dtype": dtype, "quantization": quantization}
        with LLM(folder, **ours | options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(output["token_ids"], output["logprobs"], output["prompt_logprobs"]) for output in outputs]

    alone = answer(max_num_seqs=1, max_num_batched_tokens=2048)
    for budget in (7, 48, 2048):
        assert answer(max_num_batched_tokens=budget) == alone


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_two_ranks_say_the_same(
    ranks: dict[str, Any], backend: str, folder: Path, model: PreTrainedModel, local_ranks: None
) -> None:
    prompts = draw_prompts(LENGTHS[:9])
    options = ranks | {"attention_backend": backend, "num_kvcache_blocks": None, "kvcache_memory_bytes": 1 << 20}
    check(model, prompts, serve(folder, prompts, **options))


@pytest.mark.parametrize(
    "name", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("packed with zeros", "fp8 rows"))]
)
def test_two_ranks_share_quantised_weights(name: str, packable: Path, local_ranks: None, tmp_path: Path) -> None:
    if name == "int8":
        folder = packable
        means = save_rounded(packable, tmp_path / "rounded")
    else:
        folder, means = save_quantised(packable, tmp_path, *CHECKPOINTS[name])
    expected = run(means)
    for kind in ("tensor_parallel_size", "pipeline_parallel_size"):
        options = {"quantization": "int8"} if name == "int8" else {}
        assert run(folder, attention_backend="cpu", **options, **{kind: 2}) == expected, kind


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_triton_says_the_same(quantization: str | None, tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"]
    model = save_sparse_hybrid(tmp_path, num_hidden_layers=2, layer_types=kinds)
    prompts = draw_prompts([1, 9])
    asked = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3, logprobs=1)
    options = {"attention_backend": "triton", "max_num_batched_tokens": 6, "quantization": quantization}
    with LLM(tmp_path, **OPTIONS | options) as llm:
        outputs = llm.generate(prompts, asked, use_tqdm=False)
    if quantization is None:
        check(model, prompts, outputs)
        return
    with LLM(tmp_path, **OPTIONS, quantization=quantization) as llm:
        expected = llm.generate(prompts, asked, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]


# ---- configurations and sizes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be from 1 to num_experts, which is 8"),
        ({"num_experts": 0}, "num_experts_per_tok is 2; it must be from 1 to num_experts, which is 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0; it must be at least 1"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0; it must be at least 1"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0; it must be at least 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu is supported"),
        ({"is_encoder_decoder": True}, "does not read is_encoder_decoder"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str, folder: Path, model: PreTrainedModel) -> None:
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        load_model_config(config | changes, "config.json", "nanovllm")


def test_keys_of_another_family_change_nothing(tmp_path: Path) -> None:
    """transformers ignores them in this family: every layer has experts, and their weights sum to one."""
    model = save_sparse_hybrid(tmp_path)
    strange = {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0], "intermediate_size": 0}
    edit_json(tmp_path / "config.json", **strange)
    prompts = draw_prompts([1, 9, 60])
    check(model, prompts, serve(tmp_path, prompts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_expert_intermediate_size": 33}, "shared_expert_intermediate_size is 33, which 2 ranks cannot share"),
        ({"moe_intermediate_size": 33}, "moe_intermediate_size is 33, which 2 ranks cannot share evenly"),
        ({"linear_num_key_heads": 1}, "linear_num_key_heads is 1, which 2 ranks cannot share evenly"),
    ],
)
def test_what_ranks_cannot_share_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_sparse_hybrid(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, **OPTIONS, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3.5-35b-a3b", 34.66), ("qwen3.5-122b-a10b", 122.11), ("qwen3.5-397b-a17b", 396.35)]
)
def test_shapes_have_as_many_parameters_as_their_names_say(name: str, billions: float) -> None:
    from nanovllm.apps.estimate import fetch_config

    assert Sizes(fetch_config(name)).num_parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_an_estimate_counts_experts_states_and_keys() -> None:
    """The 35B-A3B: 30 layers of 32 heads with states, 10 with keys and values of 2 heads, and 256 experts a layer."""
    from nanovllm.apps.estimate import estimate, fetch_config

    config = fetch_config("qwen3.5-35b-a3b")
    whole = estimate(config, EngineConfig("qwen3.5-35b-a3b"), 140 << 30)
    row = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert whole.fits and whole.memory.states == (whole.config.max_num_seqs + 1) * row
    assert whole.kv_bytes_per_token == 10 * 2 * 2 * 256 * 2
    shared = estimate(config, EngineConfig("qwen3.5-35b-a3b", tensor_parallel_size=2), 80 << 30)
    int8 = estimate(config, EngineConfig("qwen3.5-35b-a3b", quantization="int8"), 80 << 30)
    assert shared.fits and shared.memory.weights == pytest.approx(whole.memory.weights / 2, rel=0.01)
    assert int8.fits and int8.memory.weights == pytest.approx(whole.memory.weights / 2, rel=0.02)
