"""Outputs: text, tokens, reasons and order, for prompts in every form that is taken."""

import copy
import itertools
import json
import pickle
import random
import shutil
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.tiny import END, NOTE, SMALL, SPOKEN, TURN, draw_prompts, edit_json, greedy, make_tokenizer, save_random
from helpers.warm import WarmPython
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanovllm import LLM, Completion, Output, SamplingParams
from nanovllm.engine.output import read_text
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.text.stop_strings import StopStringMatcher
from nanovllm.text.tokenizer import Tokenizer as ModelTokenizer
from nanovllm.utils.progress import ProgressBar

OPTIONS = SMALL | {"max_model_len": 64, "num_kvcache_blocks": 32}
ID = make_tokenizer().token_to_id
RECITER = cache(ModelTokenizer)
SPECIAL = (NOTE, TURN)
TOKENS = {part: make_tokenizer().encode(part).ids for part in [*"ab<|>ne", "xyz", "é", "☃", *SPECIAL]}
"""{text: its tokens}: those of a character of several bytes, and of a special token."""
BYTES = bytes_to_unicode()
"""{byte: the token of that byte}."""
A_TO_Z = [ID(token) for token in [*"bcdefghijklm", "Ã", "©", *"nopqrstuvw", "xyz"]]
"""The reciter's text after "a", without END."""


@pytest.fixture(scope="module", params=[1, 2], ids=["depth 1", "depth 2"])
def llm(request: pytest.FixtureRequest, open_llm: Callable[..., LLM], reciter: Path) -> LLM:
    llm = open_llm(reciter, **OPTIONS)
    llm.engine.depth = request.param
    return llm


def say(llm: LLM, prompt: Any, **params: Any) -> Output:
    (output,) = llm.generate(prompt, SamplingParams(**{"temperature": 0, **params}), use_tqdm=False)
    return output


# ---- how a sequence ends


@pytest.mark.parametrize(
    ("prompt", "spoken", "last"), [("a", SPOKEN[1:], END), ("A", "BC", TURN)], ids=["tokenizer", "generation_config"]
)
def test_every_end_of_sequence_id_ends_it_in_token_ids_and_not_in_text(
    prompt: str, spoken: str, last: str, llm: LLM
) -> None:
    for skip_special_tokens in (True, False):
        output = say(llm, prompt, skip_special_tokens=skip_special_tokens)
        assert (output["text"], output["finish_reason"]) == (spoken, "stop")
        assert output["token_ids"][-1] == ID(last)
        assert output["token_ids"].count(ID(last)) == 1


def test_ignore_eos_goes_on(llm: LLM) -> None:
    output = say(llm, "A", ignore_eos=True, max_tokens=9)
    assert (output["text"], output["finish_reason"], len(output["token_ids"])) == ("BCABCAB", "length", 9)
    assert say(llm, "A", ignore_eos=True, max_tokens=3, skip_special_tokens=False)["text"] == f"BC{TURN}"


def test_special_tokens_in_the_text_are_skipped_unless_asked_for(llm: LLM) -> None:
    assert say(llm, "0", max_tokens=4)["text"] == "123"
    assert say(llm, "0", max_tokens=4, skip_special_tokens=False)["text"] == f"1{NOTE}23"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_ids_end_it_also_where_eos_is_ignored(ignore_eos: bool, llm: LLM) -> None:
    output = say(llm, "a", stop_token_ids=[ID("q"), ID("d")], ignore_eos=ignore_eos)
    assert (output["text"], output["finish_reason"]) == ("bc", "stop")
    assert output["token_ids"] == A_TO_Z[:3]


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        ("d", "bc", 3),
        ("fgh", "bcde", 7),
        ("b", "", 1),
        (["q", "fg", "gh"], "bcde", 6),
        (["hi", "efghi"], "bcdefg", 8),
        (["efghi", "hi"], "bcd", 8),
        ("é", "bcdefghijklm", 14),
        ("mén", "bcdefghijkl", 15),
        ("y", "bcdefghijklménopqrstuvwx", 25),
        ("vwxy", "bcdefghijklménopqrstu", 25),
        (["xy", "wx"], "bcdefghijklménopqrstuv", 25),
        (["z", "y", "x"], "bcdefghijklménopqrstuvw", 25),
        (["wxyz", "xy"], "bcdefghijklménopqrstuvw", 25),
        (["y", "xy"], "bcdefghijklménopqrstuvwx", 25),
        (["xy", "y"], "bcdefghijklménopqrstuvw", 25),
    ],
    ids=str,
)
def test_a_stop_string_ends_the_text_before_it_wherever_tokens_meet(
    stop: str | list[str], text: str, count: int, llm: LLM
) -> None:
    """Of several, the first to be complete counts, then the first of the list; token_ids keep the match's tokens."""
    output = say(llm, "a", stop=stop)
    assert (output["text"], output["finish_reason"]) == (text, "stop")
    assert output["token_ids"] == A_TO_Z[:count]


@pytest.mark.parametrize("stop", ["ab", "a", "never", "\ufffd", END, ["bd", "zz"]])
def test_a_stop_string_that_is_not_in_the_output_changes_nothing(stop: Any, llm: LLM) -> None:
    """Neither one that begins in the prompt, nor half of a character."""
    for limit in (64, 13):  # 13 tokens end with the first byte of "é"
        assert say(llm, "a", stop=stop, max_tokens=limit) == say(llm, "a", max_tokens=limit)


def test_a_stop_string_is_matched_in_the_text_that_is_returned(llm: LLM) -> None:
    """Special tokens that are skipped do not stand in its way, and are found where they are kept."""
    assert say(llm, "0", stop="12", max_tokens=9)["text"] == ""
    kept = say(llm, "0", stop="|note", skip_special_tokens=False, max_tokens=9)
    assert (kept["text"], kept["finish_reason"]) == ("1<", "stop")


@pytest.mark.parametrize(
    ("prompt", "stop", "text", "count"),
    [
        ("0", NOTE, "1", 2),
        ("0", [NOTE, "1"], "", 1),
        ("0", ["zz", f"{NOTE}2", f"1{NOTE}"], "", 2),
        ("0", f"1{NOTE}2", "", 3),
        ("0", f"{NOTE}23", "1", 4),
        ("0", f"{NOTE}3", "1230123", 9),  # this is never said
        ("0", ["x", f"301{NOTE}"], "12", 7),
        ("A", TURN, "BC", 3),
        ("A", f"C{TURN}A", "B", 4),
        ("A", [f"{TURN}B", NOTE], "BCABCAB", 9),
        ("w", END, "xyz", 2),
    ],
    ids=str,
)
def test_a_stop_string_may_have_special_tokens_also_where_eos_is_ignored(
    prompt: str, stop: Any, text: str, count: int, llm: LLM
) -> None:
    for skip in (True, False):
        params = SamplingParams(0, 9, stop=stop, ignore_eos=True, skip_special_tokens=skip)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert len(output.token_ids) == count
        assert output.text == text or not skip
        stops = [stop] if isinstance(stop, str) else stop
        assert (output.stop_reason in stops) == (output.finish_reason == "stop") == (count < 9)
        assert "".join(llm.stream_tokens(prompt, params)) == output.text
        params.include_stop_str_in_output = True
        (ended,) = llm.generate(prompt, params, use_tqdm=False)
        assert ended.text == output.text + (output.stop_reason or "")


def search_plainly(parts: list[str], stops: list[str], min_tokens: int) -> tuple[str, str, int] | None:
    """Find the first stop string by a search in the decoded text, one token after another.

    Args:
        parts: the text that each token adds. A special token adds nothing to the visible text.

    Returns:
        The visible text before it, the stop string, and the number of tokens with which it is complete; None without.
    """
    characters = [(number, character) for number, part in enumerate(parts, 1) for character in part]
    visible = [(number, character) for number, character in characters if parts[number - 1] not in SPECIAL]
    found = []
    for rank, stop in enumerate(stops):
        for text in [visible, characters] if any(part in stop for part in SPECIAL) else [visible]:
            for start in range(len(text) - len(stop) + 1):
                end = start + len(stop)
                count = text[end - 1][0]
                if "".join(character for _, character in text[start:end]) == stop and count > min_tokens:
                    num_after = sum(number == count for number, _ in text[end:])
                    before = "".join(character for number, character in text[:start] if (number, character) in visible)
                    found.append((count, -num_after, rank, before, stop))
    if not found:
        return None
    count, _, _, before, stop = min(found)
    return before, stop, count


@given(
    parts=st.lists(st.sampled_from(list(TOKENS)), min_size=1, max_size=12),
    cuts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 18)), min_size=1, max_size=3),
    min_tokens=st.sampled_from([0, 0, 0, 3]),
    is_included=st.booleans(),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=200)
def test_a_stop_string_with_special_tokens_is_where_a_plain_search_finds_it(
    parts: list[str], cuts: list[tuple[int, int]], min_tokens: int, is_included: bool, sizes: list[int], reciter: Path
) -> None:
    """It may begin or end inside a special token's text, and tokens may come in steps of any sizes."""
    from nanovllm.features.streaming import Pieces

    tokenizer = RECITER(reciter)
    full = "".join(parts)
    stops = [full[at % len(full) :][:length] for at, length in cuts]
    token_ids = [token_id for part in parts for token_id in TOKENS[part]]
    texts = [text for part in parts for text in [*[""] * (len(TOKENS[part]) - 1), part]]
    params = SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=is_included, max_tokens=99)
    prompt = [ID("x")]
    seq = Sequence(0, prompt, params, max_model_len=999, stop_matcher=tokenizer.stop_matcher(params, prompt))
    pieces = Pieces(Request(array("i", prompt), params, None, None, None), tokenizer)
    streamed = ""
    step_sizes = itertools.cycle(sizes)
    while token_ids and seq.finish_reason is None:
        new = token_ids[: next(step_sizes)]
        del token_ids[: len(new)]
        seq.token_ids.extend(new)
        seq.check_end(len(new))
        streamed += pieces.read(seq)
    found = search_plainly(texts, stops, min_tokens)
    if found is None:
        assert seq.finish_reason is None
        assert read_text(seq, tokenizer) == "".join(part for part in parts if part not in SPECIAL)
    else:
        text, stop, count = found
        assert (seq.stop_reason, len(seq.output_token_ids)) == (stop, count)
        assert read_text(seq, tokenizer) == streamed == text + (stop if is_included else "")


@pytest.mark.parametrize("is_included", [False, True])
def test_a_special_token_that_is_spelled_ends_the_text_as_any_stop_string(is_included: bool, reciter: Path) -> None:
    params = SamplingParams(stop=["zz", f"b{NOTE}"], include_stop_str_in_output=is_included)
    for ending in ([ID(NOTE)], [*map(ID, NOTE)]):
        matcher = ModelTokenizer(reciter).stop_matcher(params, [ID("x")])
        token_ids = [ID("a"), ID(TURN), ID("b"), *ending]
        assert [matcher.feed(token_id) for token_id in token_ids].index(True) == len(token_ids) - 1
        assert (matcher.found, matcher.text) == (f"b{NOTE}", f"ab{NOTE}" if is_included else "a")


def test_a_stop_string_that_is_the_end_of_sequence_is_in_the_text_if_it_is_to_be_included(llm: LLM) -> None:
    output = say(llm, "w", stop=END, include_stop_str_in_output=True)
    assert (output.text, output.stop_reason) == (f"xyz{END}", None)
    assert say(llm, "w", include_stop_str_in_output=True).text == "xyz"


def test_special_tokens_that_are_stop_strings_or_bad_words_do_not_come(llm: LLM) -> None:
    """Before min_tokens such a stop string may not come, as stop_token_ids may not."""
    output = say(llm, "0", stop=NOTE, min_tokens=5, max_tokens=9)
    assert ID(NOTE) not in output.token_ids[:5]
    for words in ([NOTE], ["zz", NOTE], [f"1{NOTE}"]):
        assert ID(NOTE) not in say(llm, "0", bad_words=words, max_tokens=4).token_ids
    assert ID(END) not in say(llm, "w", bad_words=[END], ignore_eos=True, max_tokens=4).token_ids


def test_a_repeated_stop_string_ends_at_its_first(llm: LLM) -> None:
    output = say(llm, "0", stop="30", max_tokens=20)
    assert (output["text"], len(output["token_ids"])) == ("12", 5)


@given(
    st.lists(st.integers(0, make_tokenizer().get_vocab_size() - 1), max_size=30),
    st.lists(st.text("aé☃x\ufffd", min_size=1, max_size=3), min_size=1, max_size=3),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_stop_strings_are_found_in_any_tokens(token_ids: list[int], stop: list[str], skip: bool) -> None:
    """Random bytes are mostly no UTF-8. Nothing raises, and the text before a match is the decoded text's.

    A match may come late (a broken character is only known as such by what follows), never early.
    """
    tokenizer = make_tokenizer()
    for text in ("aé☃x", *stop):  # also text that holds the stop strings, in bytes
        token_ids = token_ids + tokenizer.encode(text).ids
    matcher = StopStringMatcher(tokenizer, SamplingParams(stop=stop, skip_special_tokens=skip))
    decoded = tokenizer.decode(token_ids, skip_special_tokens=skip)
    matched = any(matcher.feed(token_id) for token_id in token_ids)
    if matched:
        assert decoded.startswith(matcher.text)
        assert any(decoded.startswith(s, len(matcher.text)) for s in stop)
        assert not any(s in matcher.text for s in stop)
    else:
        assert not any(s in decoded for s in stop if "\ufffd" not in s)


@pytest.mark.parametrize(
    ("prompt", "token_ids", "text"),
    [
        ("你好".encode(), b" him", " h"),  # no token of the prompt is a character
        ("a你".encode()[:-1], "你him".encode()[2:], "你h"),  # the output completes the prompt's last character
        ("你".encode()[:-1], "你him".encode()[2:], "你h"),
        ("a😀".encode()[:-3], b"him", "h"),  # it does not
        (b"\xff" * 30, b"him", "h"),
    ],
)
def test_no_replacement_character_of_the_prompt_is_in_the_text(
    prompt: bytes, token_ids: bytes, text: str, reciter: Path
) -> None:
    tokenizer = ModelTokenizer(reciter)
    before, ids = ([ID(BYTES[byte]) for byte in part] for part in (prompt, token_ids))
    assert tokenizer.decode(ids, True, before) == text + "im"
    matcher = tokenizer.stop_matcher(SamplingParams(stop="im"), before)
    assert [matcher.feed(i) for i in ids].index(True) == len(ids) - 1 and matcher.text == text


@given(
    head=st.binary(max_size=6) | st.text("a你é😀", max_size=3).map(str.encode),
    tail=st.binary(max_size=6) | st.text("你é😀b\ufffd", max_size=6).map(str.encode),
    count=st.sampled_from([1, 40]),
    data=st.data(),
)
@settings(deadline=None, max_examples=100)
def test_the_text_is_the_same_with_and_without_stop_strings(
    head: bytes, tail: bytes, count: int, data: st.DataObject, reciter: Path
) -> None:
    """Wherever the prompt ends, also within a character, and whatever bytes both hold, in short and in long runs."""
    tokenizer = ModelTokenizer(reciter)
    whole = [ID(BYTES[byte]) for byte in head + tail * count]
    border = data.draw(st.integers(0, len(whole)))
    prompt = whole[:border]
    token_ids = [*whole[border:], *map(ID, "the-end")]
    matcher = tokenizer.stop_matcher(SamplingParams(stop="the-end", include_stop_str_in_output=True), prompt)
    assert [matcher.feed(i) for i in token_ids].index(True) == len(token_ids) - 1
    assert matcher.text == tokenizer.decode(token_ids, True, prompt)


@pytest.mark.parametrize("token", [BYTES[255], NOTE, "a"])
def test_any_output_takes_linear_time_beside_stop_strings(token: str) -> None:
    matcher = StopStringMatcher(make_tokenizer(), SamplingParams(stop="stop"), [ID("a")])
    since = time.monotonic()
    assert not any(matcher.feed(ID(token)) for _ in range(30_000))
    assert time.monotonic() - since < 30, "30,000 tokens that are looked at again and again take minutes"


@pytest.mark.slow
def test_100_k_stop_strings_take_time_in_proportion_to_their_number() -> None:
    tokenizer = make_tokenizer()
    token_ids = [ID("a")] * 40 + [*map(ID, "s9")]
    seconds = []
    for count in (25_000, 100_000):
        params = SamplingParams(stop=[f"s{i}" for i in range(count, 0, -1)])
        matcher = StopStringMatcher(tokenizer, params, [ID("a")])
        since = time.process_time()
        assert [matcher.feed(token_id) for token_id in token_ids].index(True) == len(token_ids) - 1
        seconds.append(time.process_time() - since)
        assert (matcher.found, matcher.text) == ("s9", "a" * 40)
    assert seconds[1] < 8 * seconds[0], "four times as many strings"
    assert seconds[1] < 0.1 * len(token_ids), "in a step of several tens of milliseconds"


def make_fallback_tokenizer() -> Tokenizer:
    """Make a tokenizer as Llama 2's: one byte that is no character makes it replace all bytes beside it."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "stop": 257, "<unk>": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_a_text_is_the_pieces_that_its_tokens_add(reciter: Path) -> None:
    tokenizer = ModelTokenizer(reciter)
    tokenizer._backend = make_fallback_tokenizer()
    rng = random.Random(0)
    for _ in range(200):
        ids = [*rng.choices(range(259), k=4), *"aé你😀".encode()]
        prompt = rng.choices(ids, k=rng.randint(1, 4))
        token_ids = rng.choices(ids, k=rng.randint(1, 99))
        matcher = tokenizer.stop_matcher(SamplingParams(), prompt)
        for token_id in token_ids:
            before = matcher.text
            matcher.feed(token_id)
            assert matcher.text.startswith(before)
        assert matcher.text + matcher.decoder.read_rest() == tokenizer.decode(token_ids, True, prompt)
    assert tokenizer.decode([*"aé".encode(), 255], True, [257]) == "aé\ufffd"


def test_bytes_that_are_no_text_leave_a_decoder_that_falls_back_to_bytes_its_stop_strings() -> None:
    """After "#" as a byte and bytes that are no text it would take "#" back, for which tokenizers raises."""
    tokenizer = make_fallback_tokenizer()
    rng = random.Random(0)
    for _ in range(100):
        matcher = StopStringMatcher(tokenizer, SamplingParams(stop="stop"), rng.choices(range(257), k=2))
        assert not any(matcher.feed(token_id) for token_id in rng.choices(range(257), k=20))
        assert matcher.feed(257)


def test_max_tokens_cuts_it(llm: LLM) -> None:
    output = say(llm, "a", max_tokens=3)
    assert (output["text"], output["finish_reason"], len(output["token_ids"])) == ("bcd", "length", 3)


def test_an_end_with_the_last_allowed_token_is_a_stop(llm: LLM) -> None:
    assert say(llm, "A", max_tokens=3)["finish_reason"] == "stop"
    assert say(llm, "a", max_tokens=3, stop="d")["finish_reason"] == "stop"
    assert say(llm, "a", max_tokens=3, stop_token_ids=[ID("d")])["finish_reason"] == "stop"
    assert say(llm, "A", max_tokens=2)["finish_reason"] == "length"


@pytest.mark.parametrize("length", [1, 47, 48, 49, 62, 63])
def test_prompt_and_output_together_never_exceed_max_model_len(length: int, llm: LLM) -> None:
    output = say(llm, [ID("0")] * length, max_tokens=10**12)
    assert (output["finish_reason"], len(output["token_ids"])) == ("length", 64 - length)


# ---- the shape of what comes back


def test_an_output_is_a_dict_of_plain_values(llm: LLM) -> None:
    output = say(llm, "a", max_tokens=2)
    assert list(output) == [
        *("text", "token_ids", "finish_reason", "stop_reason"),
        *("prompt", "prompt_token_ids", "num_cached_tokens"),
    ]
    assert output["prompt_token_ids"] == [ID("a")]
    assert {type(i) for i in output["token_ids"] + output["prompt_token_ids"]} == {int}
    assert type(output["num_cached_tokens"]) is int
    assert list(say(llm, "a", max_tokens=2, logprobs=0))[-1] == "logprobs"


def test_an_output_answers_as_vllms_objects_do(llm: LLM) -> None:
    output = say(llm, "a", max_tokens=3, logprobs=1)
    assert isinstance(output, Output)
    (completion,) = output.outputs
    assert isinstance(completion, Completion)
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs"):
        assert output[name] == getattr(output, name) == completion[name] == getattr(completion, name), name
    assert (completion.text, completion.index, output.finished) == ("bcd", 0, True)
    assert (output.prompt, output.prompt_token_ids, output.num_cached_tokens) == ("a", [ID("a")], 0)
    assert output.logprobs is not None
    total = sum(values[i] for values, i in zip(output.logprobs, output.token_ids, strict=True))
    assert completion["cumulative_logprob"] == completion.cumulative_logprob == output.cumulative_logprob == total
    plain = say(llm, "a", max_tokens=3)
    assert plain.logprobs is plain.prompt_logprobs is plain.error is plain.outputs[0].cumulative_logprob is None
    assert completion.keys() == plain.outputs[0].keys()
    with pytest.raises(AttributeError, match="texts"):
        plain.texts  # type: ignore[attr-defined]  # noqa: B018


def test_several_completions_are_stored_once() -> None:
    outputs = [Completion(index=i, text="ab"[i], token_ids=[i], finish_reason="stop") for i in range(2)]
    output = Output(**{k: v for k, v in outputs[0].items() if k != "index"}, outputs=outputs)
    assert output.outputs is outputs
    assert [completion.text for completion in output.outputs] == ["a", "b"]


def test_scripts_hang_values_on_outputs_and_change_them_and_nothing_is_lost(llm: LLM) -> None:
    output, *_ = both = llm.generate(["a", "a"], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    output.outputs[0].reward = 1.0  # type: ignore[attr-defined]
    output.outputs[0].text = "changed"
    output.outputs.append(Completion(index=1, text="added"))
    output.score = 2  # type: ignore[attr-defined]
    for again in (output, pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert [completion.text for completion in again.outputs] == ["changed", "added"]
        assert (again.outputs[0].reward, again.outputs[0]["text"], again.score) == (1.0, "changed", 2)
    assert output == both[1], "attributes are no keys, and a completion is an object of its own"
    output.prompt = "b"
    output.outputs = []
    assert (output["prompt"], output.outputs) == ("b", [])
    assert output.tool_calls is output.tool_calls
    assert output.encoder_prompt is output.encoder_prompt_token_ids is output.lora_request is None
    (several,) = llm.generate("a", SamplingParams(n=2, max_tokens=1, logprobs=0), use_tqdm=False)
    several.outputs[1].cumulative_logprob = -1.0
    several.outputs[1].reward = 1.0  # type: ignore[attr-defined]
    assert several.outputs is several["outputs"]
    assert (several.outputs[1].reward, several.outputs[1].cumulative_logprob) == (1.0, -1.0)


def test_an_output_can_be_stored_and_copied(llm: LLM) -> None:
    output = say(llm, "a", max_tokens=3)
    assert json.loads(json.dumps(output)) == output == dict(output)
    for again in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert again == output
        assert type(again) is Output
        assert again.outputs[0].token_ids == output.token_ids


def test_the_prompt_comes_back_where_it_was_a_text(llm: LLM) -> None:
    prompts = ["ab", {"prompt": "ab"}, [ID("a"), ID("b")], {"prompt": "seen", "prompt_token_ids": [ID("a")]}]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["ab", "ab", None, "seen"]
    assert [output.text for output in outputs] == ["c", "c", "c", "b"]
    (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt == "[user]hi[assistant]"


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"stop": ["zz", "fg"]}, "fg"),
        ({"stop": ["de", "d"]}, "d"),
        ({"stop_token_ids": [ID("d")]}, ID("d")),
        ({"stop_token_ids": [ID(END)]}, None),
        ({"stop_token_ids": [ID(END)], "ignore_eos": True}, ID(END)),
        ({"max_tokens": 3, "stop": "z", "stop_token_ids": [ID("y")]}, None),
        ({"max_tokens": None}, None),
    ],
    ids=str,
)
def test_the_stop_reason_is_the_stop_that_ended_it(params: dict[str, Any], reason: Any, llm: LLM) -> None:
    assert say(llm, "a", **params).stop_reason == reason


def test_without_max_tokens_only_max_model_len_ends_it(llm: LLM) -> None:
    output = say(llm, "a", max_tokens=None, ignore_eos=True)
    assert (output.finish_reason, len(output.token_ids)) == ("length", OPTIONS["max_model_len"] - 1)


@pytest.mark.parametrize(
    "prompts",
    [
        "ab",
        [ID("a"), ID("b")],
        (ID("a"), ID("b")),
        np.array([ID("a"), ID("b")]),
        {"prompt": "ab"},
        {"prompt_token_ids": [ID("a"), ID("b")]},
        {"prompt": "ab", "prompt_token_ids": None},
        {"prompt": "ab", "multi_modal_data": None, "cache_salt": None},
        {"prompt": None, "prompt_token_ids": np.array([ID("a"), ID("b")])},
        ["ab"],
        [[ID("a"), ID("b")]],
        [{"prompt": "ab"}],
        (prompt for prompt in ["ab"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_prompt_is_taken_in_every_form(prompts: Any, reciter: Path) -> None:
    output = say(LLM(reciter, **OPTIONS), prompts, max_tokens=3)
    assert (output["text"], output["prompt_token_ids"]) == ("cde", [ID("a"), ID("b")])


def test_outputs_come_in_the_order_of_prompts_of_mixed_forms_each_with_its_own_params(llm: LLM) -> None:
    prompts = ["a", [ID("A")], {"prompt": "0"}, {"prompt_token_ids": [ID("q")]}]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 3, 2)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o["text"] for o in outputs] == ["bcdefghij", "B", "12", "rs"]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], SamplingParams(), use_tqdm=False) == []


def test_text_prompts_are_tokenised_as_the_tokenizer_does_special_tokens_included(llm: LLM) -> None:
    output = say(llm, f"hé{TURN}xyz", max_tokens=1)
    assert output["prompt_token_ids"] == [ID("h"), ID("Ã"), ID("©"), ID(TURN), ID("xyz")]


# ---- chat


def text_of(output: dict[str, Any]) -> str:
    return str(make_tokenizer().decode(output["prompt_token_ids"], skip_special_tokens=False))


def test_chat_goes_through_the_template_with_its_options(llm: LLM) -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    params = SamplingParams(temperature=0, max_tokens=3)
    (plain,) = llm.chat(talk, params, use_tqdm=False)
    (silent,) = llm.chat(talk, params, chat_template_kwargs={"enable_thinking": False}, use_tqdm=False)
    assert text_of(plain) == "[system]be brief[user]hi[assistant]"
    assert text_of(silent) == "[system]be brief[user]hi[assistant]()a"
    assert silent["text"] == "bcd"


def test_chat_takes_one_conversation_or_a_list(llm: LLM) -> None:
    talks = [[{"role": "user", "content": letter}] for letter in "xyz"]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 2, 3)]
    outputs = llm.chat(talks, params, use_tqdm=False)
    assert [text_of(o) for o in outputs] == [f"[user]{letter}[assistant]" for letter in "xyz"]
    assert [len(o["token_ids"]) for o in outputs] == [1, 2, 3]
    assert text_of(llm.chat(talks[0], params[0], use_tqdm=False)[0]) == "[user]x[assistant]"


def test_chat_takes_openais_parts_of_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt == "[user]hi\nyou[assistant]"


BODY = "{% for m in messages %}[{{ m.role }}]BODY{% endfor %}"
LOOP = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}/{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (LOOP, "[system]be/[user]hi/you/"),
        ("{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}", "[system]be[user]hi/you/"),
        ("{{ m.content }}", "[system]be[user]hi\nyou"),
        ("{{ m.content + '.' }}", "[system]be.[user]hi\nyou."),
        ("{% if m.content is string %}{{ m.content }}{% endif %}", "[system]be[user]hi\nyou"),
        ("{{ m.content[0].text }}", "[system]be[user]hi\nyou"),  # it takes one part alone
        ("{% if m.role == 'user' %}" + LOOP + "{% else %}{{ m.content | trim }}{% endif %}", "[system]be[user]hi/you/"),
        (
            "{{ m.content | tojson }}",
            '[system]"be"[user][{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]',
        ),
        ("{% if m.role != 'user' %}{{ m.content }}{% elif tools %}" + LOOP + "{% endif %}", "[system]be[user]hi/you/"),
    ],
)
def test_contents_get_the_form_that_the_template_takes(body: str, prompt: str, llm: LLM) -> None:
    options = {"chat_template": BODY.replace("BODY", body), "tools": [{"name": "f"}]}
    talk = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": ["hi", {"type": "text", "text": "you"}]},
    ]
    for _ in range(2):
        assert llm.render_chat(talk, options)["prompt"] == prompt
    apart = [{**message, "content": [{"type": "text", "text": "x"}]} for message in talk]
    whole = [{**message, "content": "x"} for message in talk]
    if "type" not in prompt and "m.content is string" not in body:
        assert llm.render_chat(apart, options) == llm.render_chat(whole, options)


def test_an_option_that_decides_the_form_spoils_no_other_chat(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    needs = "{{ raise_exception('no x') if x is not defined }}" + BODY.replace("BODY", LOOP)
    with pytest.raises(ValueError, match="no x"):
        llm.render_chat(talk, {"chat_template": needs})
    assert llm.render_chat(talk, {"chat_template": needs, "x": 1})["prompt"] == "[user]hi/"
    text = "{% if m.content is string %}{{ m.content }}{% endif %}"
    switches = BODY.replace("BODY", "{% if x %}" + LOOP + "{% else %}" + text + "{% endif %}")
    for x in (False, True, False, [1], {1, 2}, []):  # a set is no JSON
        options = {"chat_template": switches, "x": x}
        assert llm.render_chat(talk, options)["prompt"] == ("[user]hi/" if x else "[user]hi")


@pytest.mark.parametrize("form", [LOOP, "{{ m.content + '/' }}"])
@pytest.mark.parametrize("need", ["messages[0].role == 'system'", "messages | length == 4"])
def test_contents_are_written_where_the_template_refuses_other_conversations(need: str, form: str, llm: LLM) -> None:
    template = "{{ raise_exception('no') if not (" + need + ") }}" + BODY.replace("BODY", form)
    roles = ("system", "user", "assistant", "tool")
    talk = [{"role": role, "content": f"c{i}"} for i, role in enumerate(roles)]
    whole = "".join(f"[{message['role']}]{message['content']}/" for message in talk)
    assert llm.render_chat(talk, {"chat_template": template})["prompt"] == whole


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_form_that_a_conversation_does_not_show_is_found_in_another(role: str, llm: LLM) -> None:
    """The template takes parts, refuses a role that speaks twice in turn, and leaves out the last message."""
    twice = "{{ raise_exception('twice') if loop.previtem is defined and loop.previtem.role == m.role }}"
    whole = "{{ raise_exception('no parts') if m.role == ROLE and m.content is string }}".replace("ROLE", repr(role))
    body = "{% if m.role != ROLE %}{{ m.content }}{% elif not loop.last %}".replace("ROLE", repr(role)) + LOOP
    template = BODY.replace("BODY", f"{twice}{whole}{body}{{% endif %}}")
    talk = [{"role": "user", "content": "hi"}, {"role": role, "content": "be"}]
    assert llm.render_chat(talk, {"chat_template": template})["prompt"] == f"[user]hi[{role}]"
    talk.append({"role": "user", "content": "so"})
    assert llm.render_chat(talk, {"chat_template": template})["prompt"] == f"[user]hi[{role}]be/[user]so"


def test_a_role_that_the_template_leaves_out_is_left_out_and_a_users_words_are_not_lost(llm: LLM) -> None:
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    reads = "{% set c = m.content %}{% if m.role == 'user' %}{{ c }}{% endif %}"
    for body in (reads, "{% if m.role == 'user' %}" + LOOP + "{% endif %}", "{{ m.content | upper }}", ""):
        template = BODY.replace("BODY", body)
        given = [{**m, "content": [{"type": "text", "text": m["content"]}]} if "part" in body else m for m in talk]
        theirs = llm.tokenizer.apply_chat_template(given, chat_template=template, tokenize=False)
        assert llm.render_chat(talk, {"chat_template": template})["prompt"] == theirs
    parts = [{"role": "user", "content": ["hi", "you"]}]
    upper = BODY.replace("BODY", "{{ m.content | upper }}")
    assert llm.render_chat(parts, {"chat_template": upper})["prompt"] == "[user]HI\nYOU"
    strange = BODY.replace("BODY", LOOP.replace("'text'", "'input_text'"))
    with pytest.raises(ValueError, match="does not write the content of the role 'user'"):
        llm.render_chat(talk, {"chat_template": strange})
    assert llm.render_chat([{"role": "user", "content": ""}], {"chat_template": strange})["prompt"] == "[user]"


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content[:4] }}",
        "{{ m.content[-4:] }}",
        "{{ m.content[0] }}",
        "{{ m.content | truncate(9, True, '..', 0) }}",
        "{{ m.content.split(' ')[0] }}",
        "{{ m.content | string | truncate(9, True, '..', 0) }}",
        "{% for part in m.content %}{{ part.text[:4] }}{% endfor %}",
        "{{ m.content[0].text[:4] }}",
    ],
)
def test_a_template_may_write_a_part_of_a_content(body: str, llm: LLM) -> None:
    talk = [{"role": "system", "content": "be as brief as you can"}, {"role": "user", "content": "hello, who are you?"}]
    template = BODY.replace("BODY", body)
    is_of_parts = "text" in body
    given = [{**m, "content": [{"type": "text", "text": m["content"]}]} if is_of_parts else m for m in talk]
    theirs = llm.tokenizer.apply_chat_template(given, chat_template=template, tokenize=False)
    assert llm.render_chat(talk, {"chat_template": template})["prompt"] == theirs
    apart = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in talk]
    assert llm.render_chat(apart, {"chat_template": template})["prompt"] == theirs


def test_each_of_several_named_templates_has_its_own_form(reciter: Path, tmp_path: Path) -> None:
    from nanovllm.features.conversations import render_conversations

    shutil.copytree(reciter, tmp_path, dirs_exist_ok=True)
    templates = [
        {"name": "default", "template": BODY.replace("BODY", "{{ m.content }}")},
        {"name": "tool_use", "template": BODY.replace("BODY", LOOP)},
    ]
    edit_json(tmp_path / "tokenizer_config.json", chat_template=templates)
    tokenizer = ModelTokenizer(tmp_path)
    talk = [[{"role": "user", "content": ["hi", "you"]}]]
    assert render_conversations(talk, tokenizer, {}) == ["[user]hi\nyou"]
    assert render_conversations(talk, tokenizer, {"tools": [{"name": "f"}]}) == ["[user]hi/you/"]
    assert render_conversations(talk, tokenizer, {"chat_template": "tool_use"}) == ["[user]hi/you/"]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert render_conversations(talk, ModelTokenizer(tmp_path), {}) == ["hi\nyou!"]


def test_chat_has_vllms_keywords(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}]
    params = SamplingParams(temperature=0, max_tokens=1)

    def prompt(**options: Any) -> str | None:
        return llm.chat(talk, params, False, **options)[0].prompt

    assert prompt() == "[user]hi[assistant]x[assistant]"
    assert prompt(add_generation_prompt=False) == "[user]hi[assistant]x"
    assert prompt(chat_template="{{ messages | length }} {{ tools }}", tools=[{"name": "f"}]) == "2 [{'name': 'f'}]"
    last = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    assert prompt(chat_template=last, continue_final_message=True, add_generation_prompt=False) == "hi!x"
    with pytest.raises(ValueError, match="continue_final_message"):
        prompt(continue_final_message=True)
    with pytest.raises(TypeError, match="positional"):
        llm.chat(talk, params, False, {"enable_thinking": False})  # type: ignore[misc]


def test_the_tokenizer_and_the_defaults_can_be_had_and_the_defaults_are_a_copy(llm: LLM) -> None:
    assert llm.get_tokenizer() is llm.tokenizer
    assert llm.tokenizer.encode("ab") == [ID("a"), ID("b")]
    defaults = llm.get_default_sampling_params()
    defaults.max_tokens = 1
    assert llm.get_default_sampling_params() != defaults


# ---- what a model folder says


@pytest.fixture
def variant(reciter: Path, tmp_path: Path) -> Callable[..., LLM]:
    """A reciter with another generation_config.json."""

    def make(**generation: Any) -> LLM:
        shutil.copytree(reciter, tmp_path, dirs_exist_ok=True)
        edit_json(tmp_path / "generation_config.json", **generation)
        return LLM(tmp_path, **OPTIONS)

    return make


def test_without_sampling_params_the_models_generation_config_counts(variant: Callable[..., LLM]) -> None:
    llm = variant(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, max_new_tokens=7)
    assert llm.prepare("a").params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, max_tokens=7)
    assert len(llm.generate("a", use_tqdm=False)[0]["token_ids"]) == 7
    assert [len(o["token_ids"]) for o in llm.generate(["a", "A"], [None, SamplingParams(max_tokens=1)])] == [7, 1]


def test_a_generation_config_that_does_not_sample_is_greedy(variant: Callable[..., LLM]) -> None:
    assert variant(do_sample=False, temperature=0.6, top_k=20).prepare("a").params == SamplingParams(temperature=0)


@pytest.mark.parametrize("eos", [ID("d"), [ID("q"), ID("d")]], ids=["one", "several"])
def test_generation_config_may_name_one_end_or_several(eos: Any, variant: Callable[..., LLM]) -> None:
    llm = variant(eos_token_id=eos)
    assert say(llm, "a")["text"] == "bc"
    assert say(llm, "r")["token_ids"][-1] == ID(END), "the tokenizer's counts as well"


def test_without_generation_config_the_configs_end_counts(reciter: Path, tmp_path: Path) -> None:
    shutil.copytree(reciter, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    edit_json(tmp_path / "config.json", eos_token_id=ID("d"))
    assert say(LLM(tmp_path, **OPTIONS), "a")["text"] == "bc"


def test_without_a_tokenizer_ids_go_in_and_text_is_empty(tmp_path: Path) -> None:
    model = save_random(tmp_path)
    (prompt,) = draw_prompts([5])
    with LLM(tmp_path, **OPTIONS) as llm:
        output = say(llm, prompt, max_tokens=5)
    assert (output["text"], output["token_ids"]) == ("", greedy(model, prompt, 5))


def test_dummy_weights_need_config_json_alone_and_follow_the_seed(random_model: Path, tmp_path: Path) -> None:
    shutil.copy(random_model / "config.json", tmp_path)
    runs = []
    for seed in (1, 1, 2):
        with LLM(tmp_path, load_format="dummy", seed=seed, **OPTIONS) as llm:
            output = say(llm, list(range(20)), max_tokens=20)
            assert (output["text"], len(output["token_ids"])) == ("", 20)
            with pytest.raises(ValueError, match="no tokenizer"):
                llm.generate("text")
            runs.append([p.sum().item() for p in llm.engine.runner.model.parameters()])
    assert runs[0] == runs[1] != runs[2]


# ---- many prompts


def test_texts_are_tokenised_in_batches_as_they_are_one_by_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.text.prompts.BATCH", 3)
    sizes = []
    encode = type(llm.engine.tokenizer).encode_batch

    def encode_and_count(self: Any, texts: list[str], *args: Any) -> Any:
        sizes.append(len(texts))
        return encode(self, texts, *args)

    monkeypatch.setattr(type(llm.engine.tokenizer), "encode_batch", encode_and_count)
    prompts = ["a", [ID("b")], {"prompt": "xyz"}, "é", {"prompt_token_ids": [ID("c")]}, "ab", f"a{TURN}"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert sizes == [3, 2]
    ids = [[ID(c) for c in text] for text in ("a", "b", ["xyz"], "Ã©", "c", "ab", ["a", TURN])]
    assert [output.prompt_token_ids for output in outputs] == ids
    assert [output.prompt for output in outputs] == ["a", None, "xyz", "é", None, "ab", f"a{TURN}"]


@pytest.mark.parametrize("bad", ["a\ud800", "", "a" * 5000])
def test_of_a_batch_that_fails_the_prompt_is_named_and_none_runs(bad: str, llm: LLM) -> None:
    before = llm.stats()
    with pytest.raises(ValueError, match=r"^prompt 300: "):
        llm.generate(["a"] * 300 + [bad] + ["b"] * 9, SamplingParams(), use_tqdm=False)
    assert llm.stats() == before


# ---- the progress bar


def test_the_bar_shows_prompts_rates_and_kv_and_nothing_else_is_printed(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "A"], SamplingParams(temperature=0))
    shown = capfd.readouterr()
    assert shown.out == ""
    for part in ("2/2", "prefill", "decode", "tok/s", "kv"):
        assert part in shown.err.lower()
    llm.generate(["a", "A"], SamplingParams(temperature=0), use_tqdm=False)
    assert capfd.readouterr() == ("", "")


def test_the_bar_moves_with_every_step(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while no prompt has ended."""
    monkeypatch.setattr("nanovllm.llm.ProgressBar", partial(ProgressBar, mininterval=0))
    llm.generate("a", SamplingParams(temperature=0, max_tokens=20))
    drawn = [line for line in capfd.readouterr().err.split("\r") if "0/1" in line]
    assert len(set(drawn)) > 10
    assert not llm.engine.observers


@pytest.mark.slow
def test_tqdms_variable_hides_every_bar(warm_python: WarmPython) -> None:
    """tqdm reads TQDM_DISABLE when it is imported, and only for bars that are made without `disable`."""
    code = (
        "import sys\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'tqdm']: del sys.modules[name]\n"
        "from nanovllm import LLM\n"
        "llm = LLM('tiny-qwen3', device='cpu', max_model_len=128)\n"
        "assert len(llm.generate(['a', 'b'])) == 2\n"
    )
    done = warm_python.run(code, environment={"TQDM_DISABLE": "1"})
    assert (done.returncode, done.stderr) == (0, ""), "without the variable there is a bar, as a test above says"
    for path in (ROOT / "nanovllm").rglob("*.py"):
        assert "disable=" not in path.read_text(), f"{path} makes a bar without hide_unless()"


# ---- times, and plain values


def test_a_request_knows_when_it_came_began_and_ended(llm: LLM) -> None:
    before = time.time()
    short, long, n = llm.generate(
        ["a", "b", "c"], [SamplingParams(0, 1), SamplingParams(0, 8), SamplingParams(max_tokens=4, n=3, seed=1)]
    )
    after = time.time()
    for output in (short, long, n):
        metrics = pickle.loads(pickle.dumps(output)).metrics
        assert metrics == output.metrics and asdict(metrics) == vars(metrics), "clients of vLLM's call asdict()"
        assert before <= metrics.arrival_time <= metrics.first_token_ts <= metrics.last_token_ts <= after
        assert metrics.first_token_latency == metrics.first_token_ts - metrics.arrival_time
    assert long.metrics.first_token_ts < long.metrics.last_token_ts and short.metrics.last_token_ts < after
    (scored,) = llm.generate("ab", SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert scored.metrics.first_token_ts is None and scored.metrics.first_token_latency is None
    assert not llm.engine.scheduler.starting, "nothing is kept of requests that have ended"


def test_an_output_becomes_plain_values_for_json_and_parquet(llm: LLM, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, seed=1)
    outputs = llm.generate(["ab", "a"], params)
    rows = [output.to_dict() for output in outputs]
    assert json.loads(json.dumps(rows)) == rows
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == rows
    first = rows[0]["logprobs"][0][0]
    (token_id, logprob), *_ = outputs[0]["logprobs"][0].items()
    assert first == {
        "token_id": token_id,
        "logprob": logprob,
        "rank": logprob.rank,
        "decoded_token": logprob.decoded_token,
    }
    assert rows[0]["prompt_logprobs"][0] is None and rows[0].keys() == outputs[0].keys()
    (several,) = llm.generate("a", SamplingParams(max_tokens=3, n=2, logprobs=1, seed=1))
    assert json.loads(json.dumps(several.to_dict()))["outputs"][1]["text"] == several.outputs[1].text
    (vector,) = llm.embed("a")
    assert vector.to_dict()["embedding"] == vector.embedding.tolist()
