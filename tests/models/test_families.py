"""Every family of dense decoders says, token for token, what transformers says in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import CROWDED, SLIDING, draw_prompts, edit_json, greedy, greedy_all, save_random
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.models.model_config import find_window, load_model_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = {"sliding_window": 20}
COMMON: dict[str, dict[str, Any]] = {
    "untied, one kv head": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "a kv head for every head, shards": {"num_key_value_heads": 4, "max_shard_size": "60KB", "num_hidden_layers": 3},
    "group 7, head_dim 64": {"hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64},
    "head_dim 80": {"head_dim": 80, "vocab_size": 503, "intermediate_size": 90},
}
CONFIGS: list[tuple[type[PreTrainedModel], dict[str, dict[str, Any]]]] = [
    (
        Qwen3ForCausalLM,
        COMMON
        | {
            "biases": {"attention_bias": True},
            "group 16": {"num_attention_heads": 32},
            "the first layer slides": SLIDING | {"layer_types": ["sliding_attention", "full_attention"]},
        },
    ),
    (
        Qwen2ForCausalLM,
        COMMON
        | {
            "as published, head_dim from hidden_size": {"head_dim": ..., "hidden_size": 96, "num_attention_heads": 6},
            "a window switched off": {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1},
            "the last layer slides": SLIDING,
        },
    ),
    (
        LlamaForCausalLM,
        COMMON
        | {
            "as published, Llama 2": {"head_dim": ..., "tie_word_embeddings": False, "num_key_value_heads": 4},
            "as published, Llama 3.1": {"rope_parameters": LLAMA3, "num_key_value_heads": 1},
            "biases": {"attention_bias": True},
        },
    ),
    (
        MistralForCausalLM,
        COMMON
        | {
            "no window": {"sliding_window": None},
            "a window": {"sliding_window": 20, "hidden_size": 80, "head_dim": 48},
            "a window of two tokens": {"sliding_window": 2},  # of one, transformers' cache keeps all keys
        },
    ),
]
CASES = [
    pytest.param(model_class, changes, id=f"{model_class.__name__.removesuffix('ForCausalLM')}: {name}")
    for model_class, configs in CONFIGS
    for name, changes in configs.items()
]


def save(folder: Path, model_class: type[PreTrainedModel], **changes: Any) -> PreTrainedModel:
    return save_random(folder, model_class=model_class, **changes)


def say(llm: LLM, count: int = 30) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts longer than a step's budget, and some that share a prefix; and what follows them."""
    prefix, *rest = draw_prompts([40, 1, 15, 16, 17, 70, 100])
    prompts = [*rest, *(prefix + tail for tail in draw_prompts([1, 20], seed=1)), prefix]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False)
    return prompts, [output["token_ids"] for output in outputs]


@pytest.mark.parametrize(("model_class", "changes"), CASES)
def test_tokens_are_transformers(model_class: type[PreTrainedModel], changes: dict[str, Any], tmp_path: Path) -> None:
    model = save(tmp_path, model_class, **changes)
    with LLM(tmp_path, **CROWDED) as llm:
        prompts, tokens = say(llm)
        stats = llm.stats()
    assert stats["num_preemptions"] and stats["num_cached_tokens"]
    assert tokens == greedy_all(model, prompts, 30, tokens)


@pytest.mark.parametrize(
    ("model_class", "changes", "backend"),
    [
        (Qwen2ForCausalLM, SLIDING, "cpu"),
        (LlamaForCausalLM, {}, "cpu"),
        (MistralForCausalLM, WINDOW, "cpu"),
        (Qwen2ForCausalLM, SLIDING, "triton"),
        pytest.param(LlamaForCausalLM, {}, "triton", marks=pytest.mark.slow),
        pytest.param(MistralForCausalLM, WINDOW, "triton", marks=pytest.mark.slow),
    ],
)
def test_compiled_kernels_say_the_same(
    model_class: type[PreTrainedModel], changes: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    shape = {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 112}
    model = save(tmp_path, model_class, **shape, **changes)
    prompts = draw_prompts([3, 40])
    with LLM(tmp_path, **CROWDED | {"attention_backend": backend}) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [greedy(model, prompt, 4) for prompt in prompts]


@pytest.mark.parametrize(
    ("model_class", "changes"), [(MistralForCausalLM, WINDOW), (Qwen2ForCausalLM, SLIDING), (Qwen3ForCausalLM, SLIDING)]
)
def test_with_the_cpu_kernels_a_window_says_the_same(
    model_class: type[PreTrainedModel], changes: dict[str, Any], tmp_path: Path
) -> None:
    """In batches and chunks, after preemptions and prefix hits, and with decodes that are replayed."""
    model = save(tmp_path, model_class, **changes)
    with LLM(tmp_path, **CROWDED | {"attention_backend": "cpu"}) as llm:
        prompts, tokens = say(llm)
        stats = llm.stats()
        assert llm.engine.runner.steps.most_seqs, "no step was replayed"
    assert stats["num_preemptions"] and stats["num_cached_tokens"]
    assert tokens == greedy_all(model, prompts, 30, tokens)


@pytest.mark.parametrize("model_class", [Qwen2ForCausalLM, LlamaForCausalLM, MistralForCausalLM])
def test_two_ranks_say_the_same(model_class: type[PreTrainedModel], local_ranks: None, tmp_path: Path) -> None:
    changes = {"attention_bias": True} if model_class is LlamaForCausalLM else {}
    model = save(tmp_path, model_class, num_key_value_heads=1, vocab_size=501, **changes)
    with LLM(tmp_path, tensor_parallel_size=2, **CROWDED) as llm:
        prompts, tokens = say(llm)
    assert tokens == greedy_all(model, prompts, 30, tokens)


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 3}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_hidden_layers": 3}
FULL = "full_attention"
SLIDES = "sliding_attention"


@pytest.mark.parametrize(
    ("data", "windows"),
    [
        (MISTRAL, [4096] * 3),
        (MISTRAL | {"sliding_window": None}, [None] * 3),
        (MISTRAL | {"sliding_window": 64, "layer_types": [SLIDES] * 3}, [64] * 3),
        (QWEN2 | {"sliding_window": 64}, [None] * 3),
        (QWEN2 | SLIDING, [None, 20, 20]),
        (QWEN2 | SLIDING | {"layer_types": [SLIDES, FULL, SLIDES]}, [20, None, 20]),
        (LLAMA | {"sliding_window": 64, "layer_types": [FULL] * 3}, [None] * 3),
    ],
)
def test_the_window_of_each_layer_is_what_the_family_reads(data: dict[str, Any], windows: list[int | None]) -> None:
    config = load_model_config(data, "config.json")
    assert [find_window(config, index) for index in range(3)] == windows


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (MISTRAL | {"sliding_window": 64, "layer_types": [SLIDES, FULL, SLIDES]}, "layer_types.*by MistralConfig"),
        (MISTRAL | {"sliding_window": 64, "layer_types": [FULL] * 3}, "layer_types.*by MistralConfig"),
        (LLAMA | {"sliding_window": 64, "layer_types": [SLIDES] * 3}, "layer_types.*by LlamaConfig"),
        (QWEN2 | {"layer_types": [SLIDES] * 3}, "layer_types.*sliding_window None"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
        (QWEN2 | SLIDING | {"sliding_window": -5}, "sliding_window is -5; it must be at least 1"),
        (MISTRAL | {"sliding_window": 2**40}, "sliding_window is 1099511627776; it must be at most 1073741824"),
    ],
)
def test_layers_that_would_not_attend_as_config_json_says_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model_config(data, "config.json", model_impl="nanovllm")


# ---- Tokenizers that mark the beginning of words, as Llama 2's and Mistral's do

WORDS = ["▁the", "▁cat", "▁sat", "▁", "s", "a", "t", ".", "▁on"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def make_tokenizer() -> Tokenizer:
    """Words that begin with ▁, bytes for whatever else, and a bos in front of every text."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that always says "▁cat ▁sat é ▁on </s>", whatever the prompt ends with."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = make_tokenizer()
    size = tokenizer.get_vocab_size()
    cycle = [tokenizer.token_to_id(t) for t in ("▁cat", "▁sat", "<0xC3>", "<0xA9>", "▁on", "</s>")]
    shape = {"vocab_size": size, "hidden_size": size + size % 2, "num_hidden_layers": 1, "num_attention_heads": 1}
    save_random(
        folder,
        model_class=LlamaForCausalLM,
        **shape,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=8,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, :size].fill_diagonal_(1.0)
        model.lm_head.weight.zero_()
        for token in range(size):
            after = cycle[(cycle.index(token) + 1) % len(cycle)] if token in cycle else cycle[0]
            model.lm_head.weight[after, token] = 1.0
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="<s>{% for message in messages %}{{ message.content }}{% endfor %}",
    )
    edit_json(folder / "generation_config.json", do_sample=False, eos_token_id=2)
    with LLM(folder, **CROWDED) as llm:
        yield llm


PROMPTS = ["the", "the the.", "", "ü", "the s"]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_text_is_what_the_output_adds_to_the_prompt(prompt: str, skip: bool, llm: LLM) -> None:
    params = SamplingParams(temperature=0, skip_special_tokens=skip, max_tokens=10)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    tokenizer = make_tokenizer()
    before = output["prompt_token_ids"]
    ids = output["token_ids"][:-1]
    known, whole = (tokenizer.decode(part, skip_special_tokens=skip) for part in (before, before + ids))
    assert whole.startswith(known) and output["text"] == whole[len(known) :]
    assert output["text"] == (" cat saté on" if prompt or not skip else "cat saté on")


def test_pieces_and_stop_strings_keep_the_space_too(llm: LLM) -> None:
    assert "".join(llm.stream_tokens("the", SamplingParams(temperature=0, max_tokens=10))) == " cat saté on"
    (output,) = llm.generate(["the"], SamplingParams(temperature=0, stop=[" cat"]), use_tqdm=False)
    assert (output["text"], output["stop_reason"]) == ("", " cat")
    (output,) = llm.generate(["the"], SamplingParams(temperature=0, stop=["é on"]), use_tqdm=False)
    assert output["text"] == " cat sat"


def test_there_is_one_bos(llm: LLM) -> None:
    bos = 1
    params = SamplingParams(temperature=0, max_tokens=1)
    outputs = llm.generate(["the", "<s>the", "<s><s>the"], params, use_tqdm=False)
    assert [output["prompt_token_ids"].count(bos) for output in outputs] == [1, 1, 2]
    (output,) = llm.chat([{"role": "user", "content": "the"}], params, use_tqdm=False)
    assert output["prompt_token_ids"] == outputs[1]["prompt_token_ids"]
