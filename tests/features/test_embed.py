"""Embeddings are transformers' last hidden states, whatever runs beside them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import BLOCK, draw_prompts, edit_json, save_random
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from nanovllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 160,
    "kvcache_block_size": BLOCK,
    "num_kvcache_blocks": 13,  # room for little more than one long prompt
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,  # long prompts are cut into chunks
}
PREFIX, *REST = draw_prompts([40, 1, 15, 16, 17, 70, 160])
PROMPTS = [*REST, PREFIX + REST[1], PREFIX + REST[3]]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@torch.inference_mode()
def expect(model: PreTrainedModel, prompt: list[int], dimensions: int | None = None) -> np.ndarray:
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1, :dimensions]
    return torch.nn.functional.normalize(hidden, dim=0).numpy()


def embed(llm: LLM, prompts: Any = PROMPTS, **options: Any) -> list[np.ndarray]:
    return [output.embedding for output in llm.embed(prompts, use_tqdm=False, **options)]


@pytest.mark.parametrize(
    "model_class", [Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM, MistralForCausalLM, Qwen3MoeForCausalLM]
)
def test_vectors_are_transformers(model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    model = save_random(tmp_path, model_class=model_class, **(EXPERTS if "Moe" in model_class.__name__ else {}))
    with LLM(tmp_path, **OPTIONS) as llm:
        vectors = embed(llm)
        outputs = llm.embed(PROMPTS, use_tqdm=False)
        cut = embed(llm, dimensions=5)
        least = embed(llm, dimensions=1)
        raw = embed(llm, normalize=False)
        assert llm.stats()["num_generated_tokens"] == 0
    assert any(output.num_cached_tokens for output in outputs)
    for prompt, vector, (one,), short, long, output in zip(PROMPTS, vectors, least, cut, raw, outputs, strict=True):
        assert one == np.sign(long[0]), "a vector of one element has the length 1"
        np.testing.assert_allclose(vector, expect(model, prompt), atol=2e-5)
        np.testing.assert_allclose(short, expect(model, prompt, 5), atol=2e-5)
        np.testing.assert_allclose(long / np.linalg.norm(long), vector, atol=1e-6)
        assert vector.dtype == np.float32
        assert output["embedding"] is output.outputs.embedding
        assert output["prompt_token_ids"] == output.prompt_token_ids == prompt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(dtype: str, random_model: Path) -> None:
    options = OPTIONS | {"dtype": dtype, "attention_backend": "cpu", "enable_prefix_caching": False}
    with LLM(random_model, **options) as llm:
        together = embed(llm)
        alone = [embed(llm, [prompt])[0] for prompt in PROMPTS]
    with LLM(random_model, **options | {"max_num_batched_tokens": 7, "enable_prefix_caching": True}) as llm:
        in_chunks = embed(llm)
    for one, two, three in zip(together, alone, in_chunks, strict=True):
        assert one.tobytes() == two.tobytes() == three.tobytes()


def test_prompts_are_embedded_beside_others_that_generate(random_model: Path) -> None:
    generating = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    embedding = SamplingParams(max_tokens=0, embed=True)
    scoring = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
    kinds = (generating, embedding, scoring)
    for extra in ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}):
        with LLM(random_model, **OPTIONS | extra | {"num_kvcache_blocks": 10}) as llm:
            short = [prompt for prompt in PROMPTS if len(prompt) < 150]  # room for what is generated
            alone = {kind: dict(llm.stream(short, params)) for kind, params in enumerate(kinds)}
            requests = [(prompt, params) for params in kinds for prompt in short]
            mixed = dict(llm.stream(requests[i * 5 % len(requests)] for i in range(len(requests))))
            assert llm.stats()["num_preemptions"]
        for i in range(len(requests)):
            prompt, params = requests[i * 5 % len(requests)]
            expected = alone[kinds.index(params)][short.index(prompt)]
            assert mixed[i]["token_ids"] == expected["token_ids"]
            if params is embedding:
                np.testing.assert_allclose(mixed[i]["embedding"], expected["embedding"], rtol=1e-4, atol=1e-4)
            else:
                assert "embedding" not in mixed[i]


def test_no_head_is_multiplied(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(random_model, **OPTIONS) as llm:
        monkeypatch.setattr(llm.engine.runner.model, "compute_logits", None)  # a call would fail
        assert len(embed(llm)) == len(PROMPTS)


@pytest.mark.parametrize("form", ["Qwen3Model", "no prefix", "no prefix, untied", "Qwen3Model, two files"])
def test_checkpoints_that_only_embed(form: str, tmp_path: Path) -> None:
    model = save_random(tmp_path / "whole", tie_word_embeddings=False)
    folder = tmp_path / "bare"
    model.model.save_pretrained(folder, max_shard_size="60KB" if "two files" in form else "1GB")
    if "no prefix" in form:  # as Qwen3-Embedding is published: the name of the class that generates, without its head
        edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"], tie_word_embeddings="untied" not in form)
    with LLM(folder, **OPTIONS) as llm:
        for prompt, vector in zip(PROMPTS, embed(llm), strict=True):
            np.testing.assert_allclose(vector, expect(model, prompt), atol=2e-5)
        if form == "no prefix":  # the embedding is its head, as config.json says
            assert llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)[0]["token_ids"]
        else:
            assert llm.engine.runner.model.lm_head.weight is llm.engine.runner.model.embed_tokens.weight
            with pytest.raises(ValueError, match=r"no LM head, so it can only embed"):
                llm.generate([[1, 2]], use_tqdm=False)


def test_a_checkpoint_that_lost_its_head_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_random(tmp_path, tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 tensors: lm_head\.weight"):
        LLM(tmp_path, **OPTIONS)


def test_mistakes(reciter: Path) -> None:
    with LLM(reciter, max_model_len=16, dtype="float32") as llm:
        size = llm.engine.facts.embedding_size
        with pytest.raises(ValueError, match=rf"dimensions is {size + 1}; it must be at most {size}"):
            llm.embed("abc", dimensions=size + 1)
        with pytest.raises(ValueError, match="dimensions is 0"):
            llm.embed("abc", dimensions=0)
        with pytest.raises(ValueError, match=r"prompt 1: .*17 tokens; with max_model_len=16 it may have at most 16"):
            llm.embed(["a", [1] * 17])
        with pytest.raises(ValueError, match="normalize"):
            llm.embed("a", normalize="yes")
        assert len(llm.embed([1] * 16)) == 1
        assert llm.embed([]) == []
    for wrong in ({"max_tokens": 5}, {"max_tokens": 0, "prompt_logprobs": 1}):
        with pytest.raises(ValueError, match="embed is True; it must be False unless max_tokens is 0"):
            SamplingParams(embed=True, **wrong)


def test_a_text_ends_with_the_token_that_the_tokenizer_appends(reciter: Path, tmp_path: Path) -> None:
    """As that of Qwen3-Embedding does: the model was trained to pool this token."""
    from shutil import copytree

    from helpers.tiny import END
    from tokenizers import Tokenizer, processors

    folder = copytree(reciter, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM(folder, max_model_len=16, dtype="float32") as llm:
        (output,) = llm.embed("ab", use_tqdm=False)
        (same,) = llm.embed([output.prompt_token_ids], use_tqdm=False)
        assert len(output.prompt_token_ids) == 3 and output.prompt_token_ids[-1] == end
        assert output.embedding.tolist() == same.embedding.tolist()


@pytest.mark.parametrize("page", ["embeddings", "new-weights"])
def test_the_pages_examples_run(page: str) -> None:
    """With the built-in model. Blocks about adapters need some: test_lora.py and test_adapters.py stand for them."""
    from helpers.paths import ROOT

    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    code = "".join(block for block in blocks if "lora" not in block.lower())
    exec(code.replace("Qwen/Qwen3-Embedding-0.6B", "tiny-qwen3"), {})
