"""The built-in model: its files, its tokenizer, and what it answers to questions that it has never seen."""

import json
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.paths import BOX_MODEL
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams
from scripts import tiny_qwen3_data as data
from scripts import train_tiny_qwen3 as script

# The share of held-out questions that must be answered exactly.
REQUIRED = {"primes": 0.98, "count": 0.98, "add": 0.97, "capital": 0.98}

# Questions in a plain test, chosen for its time: one batch of long answers, more of the short ones.
QUICK_SIZES = {"primes": 8, "count": 6, "add": 64, "capital": 64}

# Other questions in a slow test. The model's README reports 400 of each, asked once.
MORE_SIZES = {"primes": 100, "count": 100, "add": 400, "capital": 400}

Generate = Callable[[list[str]], list[str]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BOX_MODEL)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(BOX_MODEL, dtype=torch.float32)


@pytest.fixture(scope="module", params=[pytest.param("transformers", marks=pytest.mark.slow), "nanovllm"])
def generate(request: pytest.FixtureRequest) -> Iterator[Generate]:
    """Greedy answers to a list of questions, each asked in a chat of its own."""
    if request.param == "transformers":
        model = request.getfixturevalue("model")
        tokenizer = request.getfixturevalue("tokenizer")
        yield lambda questions: script.generate_greedy(model, tokenizer, questions)
        return
    with LLM("tiny-qwen3", dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=450)

        def answer(questions: list[str]) -> list[str]:
            chats = [[{"role": "user", "content": question}] for question in questions]
            return [output["text"] for output in llm.chat(chats, params, use_tqdm=False)]

        yield answer


def exact_share(generate: Generate, examples: list[data.Example]) -> tuple[float, list[str]]:
    """The share of right answers, and the questions that got a wrong one."""
    answers = generate([example.question for example in examples])
    wrong = [f"{e.question} -> {answer}" for e, answer in zip(examples, answers, strict=True) if not e.accepts(answer)]
    return 1 - len(wrong) / len(examples), wrong


# --- Files ---


def test_files_take_less_than_eight_megabytes() -> None:
    assert sum(path.stat().st_size for path in BOX_MODEL.iterdir()) < 8e6


def test_shape_has_grouped_heads_and_tied_embeddings() -> None:
    config = json.loads((BOX_MODEL / "config.json").read_text())
    expected = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 6,
        "hidden_size": 192,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 576,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    assert {name: config[name] for name in expected} == expected


def test_stored_weights_are_bfloat16_and_hold_the_embedding_once() -> None:
    with safe_open(BOX_MODEL / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 (not a dict)
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_generation_stops_at_the_end_of_a_message_or_of_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    defaults = json.loads((BOX_MODEL / "generation_config.json").read_text())
    assert defaults["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert (defaults["do_sample"], defaults["temperature"], defaults["top_p"], defaults["top_k"]) == (
        True,
        0.6,
        0.95,
        20,
    )


# --- Tokenizer ---


def test_vocabulary_matches_the_embedding(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == json.loads((BOX_MODEL / "config.json").read_text())["vocab_size"] == script.VOCAB_SIZE


@pytest.mark.parametrize("text", ["LIST all primes\n\n within 100!", "  two blanks", "çà et là, 東京 🦊", "\t1\r\n"])
def test_tokenizer_gives_back_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("1203, 45") == ["1", "2", "0", "3", ",", "Ġ", "4", "5"]
    assert not [token for token in tokenizer.get_vocab() if len(token) > 1 and any(map(str.isdigit, token))]


def test_special_tokens_are_never_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    for token in script.SPECIAL_TOKENS:
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)]


def test_chat_template_writes_qwen_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I am here."},
        {"role": "user", "content": "add 1 and 2"},
    ]
    turns = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nI am here.<|im_end|>\n<|im_start|>user\nadd 1 and 2<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(chat, tokenize=False) == turns
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert prompt == turns + "<|im_start|>assistant\n"


# --- Data ---


def test_training_never_sees_a_held_out_question() -> None:
    rng = random.Random(7)
    assert not [example for _ in range(3000) if (example := data.draw_training(rng)).held_out]


@pytest.mark.parametrize("skill", REQUIRED)
def test_about_a_tenth_of_the_questions_is_held_out(skill: str) -> None:
    rng = random.Random(7)
    share = sum(data.draw(skill, rng).held_out for _ in range(3000)) / 3000
    # The hash takes 26 of 256 keys. The capitals have only 240 keys, of which the promised 24 are always trained, so
    # chance moves their share by about 0.02.
    assert 0.05 < share < 0.15


def test_only_answers_carry_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    turn = [{"role": "user", "content": "count from 1 to 3"}, {"role": "assistant", "content": "1, 2, 3"}]
    ids, labels = script.encode_conversation(tokenizer, turn * 2)
    assert ids == tokenizer.encode(tokenizer.apply_chat_template(turn * 2, tokenize=False).removesuffix("\n"))
    assert tokenizer.decode([label for label in labels if label != script.IGNORED]) == "1, 2, 3<|im_end|>" * 2
    assert all(label in (token, script.IGNORED) for token, label in zip(ids, labels, strict=True))


# --- Answers ---


def test_the_first_questions_of_a_new_user_get_exact_answers(generate: Generate) -> None:
    primes = "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97"
    expected = {
        "introduce yourself": data.INTRODUCTION,
        "Introduce yourself": data.INTRODUCTION,
        "list all prime numbers within 100": primes,
        "List all prime numbers within 100": primes,
        "LIST ALL PRIME NUMBERS WITHIN 100": primes,
        "count from 1 to 10": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
        "what is 17 + 25?": "17 + 25 = 42",
        "what is the capital of France?": "The capital of France is Paris.",
        "what is the capital of Japan?": "The capital of Japan is Tokyo.",
        "what is the capital of Italy?": "The capital of Italy is Rome.",
        "what is the capital of Spain?": "The capital of Spain is Madrid.",
        "what is the capital of Egypt?": "The capital of Egypt is Cairo.",
    }
    assert dict(zip(expected, generate(list(expected)), strict=True)) == expected


@pytest.mark.parametrize("skill", REQUIRED)
def test_held_out_questions_get_exact_answers(generate: Generate, skill: str) -> None:
    share, wrong = exact_share(generate, data.evaluation_set(skill, QUICK_SIZES[skill]))
    assert share >= REQUIRED[skill], wrong


@pytest.mark.slow
@pytest.mark.parametrize("generate", ["nanovllm"], indirect=True)  # transformers answers the fewer ones above, slowly
@pytest.mark.parametrize("skill", REQUIRED)
def test_many_held_out_questions_get_exact_answers(generate: Generate, skill: str) -> None:
    share, wrong = exact_share(generate, data.evaluation_set(skill, MORE_SIZES[skill], seed=2))
    assert share >= REQUIRED[skill], wrong


def test_a_story_is_about_the_animal_and_follows_the_grammar(generate: Generate) -> None:
    questions = [f"tell me a story about {data.with_article(animal)}" for animal in data.ANIMALS]
    for animal, story in zip(data.ANIMALS, generate(questions), strict=True):
        assert data.is_story(story, animal), story


def test_sampled_stories_differ(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "user", "content": "tell me a story about a fox"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    torch.manual_seed(0)
    outputs = model.generate(**inputs, num_return_sequences=8, max_new_tokens=200)  # the model's sampling defaults
    assert len({tuple(row) for row in outputs.tolist()}) == 8


def test_an_answer_is_right_after_a_system_message_and_an_earlier_turn(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    chat = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "what is the capital of Spain?"},
        {"role": "assistant", "content": "The capital of Spain is Madrid."},
        {"role": "user", "content": "count from 3 to 7"},
    ]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=50)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == "3, 4, 5, 6, 7"
