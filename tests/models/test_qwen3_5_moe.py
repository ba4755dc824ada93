"""Qwen3.5-MoE, hybrids with experts and a shared expert, says token for token what transformers says."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hybrids import save_hub_form, save_sparse_hybrid
from helpers.tiny import CROWDED, draw_prompts, logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

from nanovllm import LLM, SamplingParams

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


PLAIN = 8
"""Drawn models that are tested plainly; the others are slow tests."""


@pytest.mark.parametrize("seed", [*range(PLAIN), *(pytest.param(i, marks=pytest.mark.slow) for i in range(PLAIN, 40))])
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
