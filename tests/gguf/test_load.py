"""Models in GGUF say what transformers says with the numbers that the file means."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gguf_models import MODELS, Types, save_gguf
from helpers.tiny import SMALL, draw_prompts, greedy, logits_of

from nanovllm import LLM, SamplingParams

pytest.importorskip("gguf")

OPTIONS = SMALL | {"device": "cpu", "attention_backend": "torch"}
PROMPTS = draw_prompts([5, 33, 64])
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)


def compare(path: Path, model: Any) -> None:
    """Compare tokens and log-probabilities of prompts, with plain torch and with the C++ kernels.

    All compute in float32, so they differ by rounding alone.
    """
    answers = []
    for backend in ("torch", "cpu"):
        with LLM(path, **OPTIONS | {"attention_backend": backend}) as llm:
            answers.append(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    for prompt, *outputs in zip(PROMPTS, *answers, strict=True):
        expected = logits_of(model, prompt).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        expected_tokens = greedy(model, prompt, PARAMS.max_tokens)
        for output in outputs:
            entries = zip(output["prompt_logprobs"][1:], prompt[1:], strict=True)
            found = [entry[token].logprob for entry, token in entries]
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)
            assert output["token_ids"] == expected_tokens


def mix(**kinds: str) -> Types:
    """Return the types of a mixture: of the tensors that are named, and "others"."""
    return lambda name: next((kind for part, kind in kinds.items() if part in name), kinds["others"])


MIXTURES: dict[str, tuple[str, Types | str]] = {
    "Q2_K": ("llama", mix(attn_v="Q3_K", ffn_down="Q3_K", output="Q6_K", others="Q2_K")),
    "Q3_K_M": ("llama", mix(attn_v="Q5_K", ffn_down="Q4_K", output="Q6_K", others="Q3_K")),
    "Q4_0": ("qwen3", mix(token_embd="Q6_K", others="Q4_0")),
    "Q4_K_M": ("qwen3", mix(attn_v="Q6_K", ffn_down="Q6_K", token_embd="Q6_K", others="Q4_K")),
    "Q4_K_M of experts": ("qwen3moe", mix(attn_v="Q6_K", ffn_down="Q6_K", gate_inp="F32", others="Q4_K")),
    "Q5_K_M": ("qwen2", mix(attn_v="Q6_K", ffn_down="Q6_K", token_embd="Q6_K", others="Q5_K")),
    "Q6_K": ("llama", "Q6_K"),
    "IQ4_XS": ("qwen3", mix(attn_v="Q5_K", token_embd="Q6_K", others="IQ4_XS")),
    "older types": ("qwen3", mix(attn="Q5_0", ffn_down="Q5_1", token_embd="IQ4_NL", others="Q4_1")),
    "F16": ("qwen3", "F16"),
    "BF16": ("llama", "BF16"),
    "F16 beside codes": ("qwen3", mix(token_embd="F16", attn_k="BF16", ffn_down="F32", others="Q4_0")),
    "types that become floats": ("qwen2", mix(ffn="IQ3_S", token_embd="Q5_K", others="IQ2_S")),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_each_mixture_says_what_transformers_says(tmp_path: Path, name: str) -> None:
    """F16 and BF16 stay the file's numbers, whatever stands beside them."""
    model = save_gguf(tmp_path / "model.gguf", *MIXTURES[name])
    compare(tmp_path / "model.gguf", model)


QUICK = ("qwen2", "qwen3", "qwen3moe", "mixtral", "llama", "gemma2", "gemma3", "granite", "phi3", "command-r", "glm4")
"""Architectures with a code of their own here, or with a reading of their own. Others need a row of the table alone."""


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]
)
def test_each_architecture_says_what_transformers_says(tmp_path: Path, architecture: str) -> None:
    model = save_gguf(tmp_path / "model.gguf", architecture, "Q8_0")
    compare(tmp_path / "model.gguf", model)
