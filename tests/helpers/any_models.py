"""Small random models of many architectures of transformers, and transformers' own answers."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from helpers.tiny import CROWDED, SMALL_MODEL, VOCAB_SIZE, draw_prompts
from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
WINDOW = 20
"""The sliding window of the models that have one. Most prompts are longer."""


class Case(NamedTuple):
    """An architecture with the configuration of a small model.

    Attributes:
        kinds: the kinds of attention and of layers that make it worth a row.
        changes: the keys of its configuration that differ from those of helpers/tiny.py; `...` leaves one out.
    """

    kinds: str
    changes: dict[str, Any]


SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": ...,
    "num_key_value_heads": 4,
}
DEEPSEEK = LATENT | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
OLD = {"num_key_value_heads": ..., "head_dim": ...}

CASES: dict[str, Case] = {
    "LlamaForCausalLM": Case("full", {}),
    "Qwen2ForCausalLM": Case("full, biases", {"head_dim": ...}),
    "Qwen3ForCausalLM": Case("full, norms of heads", {}),
    "Qwen3MoeForCausalLM": Case("full, experts", SPARSE),
    "Qwen2MoeForCausalLM": Case("full, experts, shared expert", SPARSE | {"shared_expert_intermediate_size": 48}),
    "MistralForCausalLM": Case("window", {"sliding_window": WINDOW}),
    "MinistralForCausalLM": Case("window", SLIDING),
    "Ministral3ForCausalLM": Case("window, scaled queries", {"sliding_window": WINDOW}),
    "MixtralForCausalLM": Case("window, experts", {"sliding_window": WINDOW, "num_local_experts": 4}),
    "GemmaForCausalLM": Case("full", {}),
    "Gemma2ForCausalLM": Case("window, caps", SLIDING | {"query_pre_attn_scalar": 32}),
    "Gemma3ForCausalLM": Case("window, norms of heads", SLIDING | {"query_pre_attn_scalar": 32}),
    "Gemma3nForCausalLM": Case(
        "window, shared keys",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 8,
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "Gemma4ForCausalLM": Case(
        "window, heads that differ by layer, shared keys",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "global_head_dim": 64,
        },
    ),
    "VaultGemmaForCausalLM": Case("window, caps", SLIDING | {"query_pre_attn_scalar": 32}),
    "PhiForCausalLM": Case("full, partial rotation", OLD | {"num_key_value_heads": 2}),
    "Phi3ForCausalLM": Case("window, partial rotation", {"sliding_window": WINDOW, "pad_token_id": 0}),
    "PhimoeForCausalLM": Case(
        "window, experts", {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "SmolLM3ForCausalLM": Case("full, layers without rotation", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "OlmoForCausalLM": Case("full, clipped", {"clip_qkv": 2.0}),
    "Olmo2ForCausalLM": Case("full, norms of all heads", {}),
    "Olmo3ForCausalLM": Case("window, norms of all heads", SLIDING),
    "OlmoeForCausalLM": Case("full, experts", {"head_dim": ..., "num_experts": 8, "num_experts_per_tok": 2}),
    "FlexOlmoForCausalLM": Case("full, experts", {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "GraniteForCausalLM": Case(
        "full, scaled", {"logits_scaling": 0.5, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
    ),
    "GraniteMoeForCausalLM": Case("full, experts, scaled", {"num_local_experts": 4, "logits_scaling": 0.5}),
    "GraniteMoeSharedForCausalLM": Case(
        "full, experts, shared expert", {"num_local_experts": 4, "shared_intermediate_size": 48}
    ),
    "GraniteMoeHybridForCausalLM": Case(
        "full, experts",
        {"num_local_experts": 4, "shared_intermediate_size": 48, "layer_types": ["attention", "attention"]},
    ),
    "GlmForCausalLM": Case("full, partial rotation", {"pad_token_id": 0}),
    "Glm4ForCausalLM": Case("full, partial rotation", {"pad_token_id": 0}),
    "Glm4MoeForCausalLM": Case(
        "full, experts",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "Glm4MoeLiteForCausalLM": Case("latent, experts", DEEPSEEK | {"mlp_layer_types": ["dense", "sparse"]}),
    "CohereForCausalLM": Case("full, scaled logits", {"pad_token_id": 0, "logit_scale": 0.5}),
    "Cohere2ForCausalLM": Case("window, scaled logits", SLIDING | {"pad_token_id": 0, "logit_scale": 0.5}),
    "StableLmForCausalLM": Case("full, partial rotation", {"head_dim": ...}),
    "Starcoder2ForCausalLM": Case("window, biases", {"sliding_window": WINDOW}),
    "GptOssForCausalLM": Case(
        "window, sinks, experts", SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
    ),
    "NemotronForCausalLM": Case("full, partial rotation", {}),
    "Exaone4ForCausalLM": Case("window, layers without rotation", SLIDING),
    "SeedOssForCausalLM": Case("full, biases", {}),
    "HunYuanDenseV1ForCausalLM": Case("full, norms of heads", {}),
    "HunYuanMoEV1ForCausalLM": Case("full, experts", {"num_experts": 4, "moe_topk": 2}),
    "Ernie4_5ForCausalLM": Case("full", {}),
    "Ernie4_5_MoeForCausalLM": Case(
        "full, experts", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_start_index": 1}
    ),
    "ArceeForCausalLM": Case("full", {}),
    "ApertusForCausalLM": Case("full, norms of heads", {}),
    "HeliumForCausalLM": Case("full", {"head_dim": 16}),
    "BitNetForCausalLM": Case("full", {"head_dim": ...}),
    "MiniCPM3ForCausalLM": Case("latent", LATENT),
    "DeepseekV2ForCausalLM": Case("latent, experts", DEEPSEEK | {"topk_method": "group_limited_greedy"}),
    "DeepseekV3ForCausalLM": Case("latent, experts", DEEPSEEK),
    "OPTForCausalLM": Case(
        "full, learned positions", OLD | {"ffn_dim": 96, "word_embed_proj_dim": 64, "intermediate_size": ...}
    ),
    "GPT2LMHeadModel": Case("full, learned positions", OLD | {"intermediate_size": ...}),
    "GPTNeoXForCausalLM": Case("full, partial rotation", OLD | {"tie_word_embeddings": False}),
    "GPTJForCausalLM": Case(
        "full, partial rotation", OLD | {"rotary_dim": 8, "intermediate_size": ..., "tie_word_embeddings": False}
    ),
    "GPTBigCodeForCausalLM": Case("full, one KV head", OLD | {"intermediate_size": ...}),
    "Dots1ForCausalLM": Case(
        "full, experts",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    "MiniMaxM2ForCausalLM": Case("full, experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "MiMoV2FlashForCausalLM": Case(
        "window, sinks, narrow values, experts",
        SLIDING
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "v_head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "NanoChatForCausalLM": Case("full, capped logits", {}),
    "CwmForCausalLM": Case("window", SLIDING | {"bos_token_id": 0}),
    "PersimmonForCausalLM": Case("full, norms of heads", OLD),
    "LagunaForCausalLM": Case("window, experts", SLIDING | SPARSE | {"shared_expert_intermediate_size": 48}),
    "Jais2ForCausalLM": Case("full", {}),
    "SolarOpenForCausalLM": Case(
        "full, experts", {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    ),
    "YoutuForCausalLM": Case("latent", LATENT),
    "HyperCLOVAXForCausalLM": Case("full, scaled", {"logits_scaling": 0.5, "attention_multiplier": 0.2}),
    "AfmoeForCausalLM": Case("window, gated, experts", SLIDING | SPARSE | {"num_shared_experts": 1}),
    "MellumForCausalLM": Case("window, experts", SLIDING | SPARSE),
    "GraniteSWAForCausalLM": Case("window, scaled", SLIDING | {"logits_scaling": 0.5}),
    "ExaoneMoeForCausalLM": Case("window, experts", SLIDING | SPARSE | {"mlp_layer_types": ["dense", "sparse"]}),
    "BioGptForCausalLM": Case("full", {}),
    "AriaTextForCausalLM": Case("full, experts", {"moe_num_experts": 4}),
}
"""By the name of transformers' class."""


def make_config(name: str, **changes: Any) -> transformers.PretrainedConfig:
    """Return the configuration of a small model of an architecture. A change to `...` takes a value out."""
    values = SMALL_MODEL | {"pad_token_id": None} | CASES[name].changes | changes
    given = {key: value for key, value in values.items() if value is not ...}
    config: transformers.PretrainedConfig = getattr(transformers, name).config_class(**given)
    return config


@torch.no_grad()
def save_any(folder: Path, name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a small random float32 model of an architecture to folder, and return transformers' model of it.

    See `save_random` for the numbers, which make the likeliest token clear.
    """
    torch.manual_seed(seed)
    model = getattr(transformers, name)(make_config(name, **changes)).float().eval()
    norm = ""
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            parameter.normal_(0, 0.3)
        elif parameter.dim() < 2:
            parameter.uniform_(0.5, 1.5)
            norm = path
        else:
            parameter.mul_(5 if "embed" in path or "wte" in path or "head" in path else 8)
    if norm:
        model.get_parameter(norm).mul_(6)  # the last one
    model.save_pretrained(folder)
    return model


class Comparison(NamedTuple):
    """How an engine's tokens compare with transformers'.

    Attributes:
        num_equal: tokens that are transformers' likeliest after the same text.
        num_tokens: all tokens.
        worst: the largest difference of a token's log-probability.
    """

    num_equal: int
    num_tokens: int
    worst: float


@torch.inference_mode()
def compare(model: PreTrainedModel, llm: LLM) -> Comparison:
    """Have an engine answer prompts longer than a step's budget, and some that share a prefix; compare its answers."""
    prefix, *rest = draw_prompts([40, 1, 15, 16, 17, 70, 100])
    prompts = [*rest, *(prefix + tail for tail in draw_prompts([1, 20], seed=1)), prefix]
    num_equal = 0
    num_tokens = 0
    worst = 0.0
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        tokens = output["token_ids"]
        ids = torch.tensor([[*prompt, *tokens]])
        expected = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        num_equal += int((expected.argmax(-1) == torch.tensor(tokens)).sum())
        num_tokens += len(tokens)
        found = torch.tensor([one[token].logprob for one, token in zip(output["logprobs"], tokens, strict=True)])
        worst = max(worst, float((found - expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]).abs().max()))
    return Comparison(num_equal, num_tokens, worst)


def run_case(folder: Path, name: str, **options: Any) -> tuple[Comparison, dict[str, Any]]:
    """Compare a small model of an architecture with transformers; also return the engine's counts."""
    model = save_any(folder, name)
    with LLM(folder, **CROWDED | {"attention_backend": "torch", "model_impl": "transformers"} | options) as llm:
        return compare(model, llm), llm.stats()
