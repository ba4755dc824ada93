"""Text that is no text, and thinking that is opened and closed at random: the parts are those of the whole."""

import random
from pathlib import Path

from helpers.tiny import END, TURN, edit_json, make_tokenizer, save_random
from tokenizers import AddedToken

from nanovllm import LLM, SamplingParams

TAGS = ["<think>", "</think>", "<tool_call>"]
BEGINNINGS = ["a", "é", "\ufffd", "你好", "<think>", "</think>", "<think>b", TURN, "\n", " ", "\x00"]
STOPS = ["\ufffd", "\ufffd\ufffd", "é", "e", " ", "<think>", "never comes"]


def test_pieces_and_parts_of_hostile_outputs_are_those_of_the_text(tmp_path: Path) -> None:
    """A random model of bytes writes halves of characters; tags and some bytes come often."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    size = tokenizer.get_vocab_size()
    save_random(tmp_path, vocab_size=size, eos_token_id=tokenizer.token_to_id(END))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", eos_token=END)
    rng = random.Random(0)
    prompts = ["".join(rng.choices(BEGINNINGS, k=rng.randint(1, 4))) for _ in range(60)]
    prompts[::4] = [prompt + "<think>\n" for prompt in prompts[::4]]
    params = []
    for i in range(60):
        tags = {tokenizer.token_to_id(tag): rng.choice([0.0, 8.0, 14.0]) for tag in (*TAGS, TURN)}
        bias = tags | dict.fromkeys(rng.sample(range(256), 12), 12.0)
        stop = None if i % 2 else rng.sample(STOPS, 2)
        skip = rng.random() < 0.5
        params.append(SamplingParams(1.0, 20, seed=i, logit_bias=bias, stop=stop, skip_special_tokens=skip))
    options = {"dtype": "float32", "max_model_len": 64, "num_kvcache_blocks": 64, "kvcache_block_size": 16}
    with LLM(tmp_path, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert sum(output.stop_reason in STOPS for output in outputs) > 5
        for i in range(0, 60, 3):
            pieces = list(llm.stream_tokens(prompts[i], params[i]))
            assert "".join(pieces) == outputs[i].text
    with LLM(tmp_path, **options, reasoning_parser="qwen3") as llm:
        split = llm.generate(prompts, params, use_tqdm=False)
    assert sum(bool(one.reasoning and one.text) for one in split) > 2
    for whole, one in zip(outputs, split, strict=True):
        assert whole.token_ids == one.token_ids
        if one.reasoning is None:
            assert one.text == whole.text
        else:
            place = whole.text.find(one.reasoning)
            assert place >= 0 and whole.text[:place].strip() in ("", "<think>")
            assert whole.text[place + len(one.reasoning) :].endswith(one.text)
