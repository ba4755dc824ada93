"""Bad input is refused before anything runs, in words that name the value, the limit and what to change."""

import copy
import json
import math
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paths import ROOT, TESTS
from helpers.tiny import SMALL, edit_json, save_random
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.config import EngineConfig
from nanovllm.models.hub import find_model

OPTIONS = SMALL | {"max_model_len": 32, "num_kvcache_blocks": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=4)


# ---- requests


@pytest.fixture(scope="module")
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm(**OPTIONS)


@pytest.fixture(scope="module")
def with_text(open_llm: Callable[..., LLM], reciter: Path) -> LLM:
    return open_llm(reciter, **OPTIONS)


def assert_refused_and_usable(llm: LLM, call: Callable[[], object], message: str) -> None:
    (good,) = llm.generate([[65]], GREEDY, use_tqdm=False)
    before = llm.stats()
    with pytest.raises(ValueError, match=message):
        call()
    assert llm.stats() == before, "something ran"
    assert llm.generate([[65]], GREEDY, use_tqdm=False)[0]["token_ids"] == good["token_ids"]


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "no tokens": ([[]], "prompt is empty.* at least one"),
    "a prompt of max_model_len": ([[1] * 32], "32 tokens.*max_model_len=32.* at most 31.*raise max_model_len"),
    "a prompt beyond max_model_len": ([[1] * 99], "99 tokens.*max_model_len=32"),
    "an id at the vocabulary's end": ([[1, 500]], r"token id 500.*0\.\.499"),
    "an id of 64 bits": ([[1, 2**40]], r"token id 1099511627776.*0\.\.499"),
    "an id whose lowest 32 bits are a good one": ([[1, 2**32 + 3]], r"token id 4294967299.*0\.\.499"),
    "an id of 32 bits without a sign": ([[1, 2**31]], r"token id 2147483648.*0\.\.499"),
    "a negative id": ([[3, -1]], r"token id -1.*0\.\.499"),
    "a float id": ([[1, 2.0]], "2.0.*integer"),
    "a boolean id": ([[1, True]], "True.*integer"),
    "a string among ids": ([[1, "2"]], "'2'.*integer"),
    "None among ids": ([[1, None]], "None.*integer"),
    "None": (None, "None"),
    "None in a list": ([None], "None"),
    "a number": (5, "5.*string.*list"),
    "bytes": ([b"abc"], "b'abc'"),
    "bytes alone": (b"abc", "b'abc'.*string"),
    "a tensor of floats": (torch.tensor([1.0, 2.0]), "1.0.*integer"),
    "a dict of something else": ([{"text": "abc"}], "'text'.*prompt_token_ids"),
    "a dict with more": ([{"prompt_token_ids": [1], "multi_modal_data": 1}], "multi_modal_data"),
    "an empty dict": ([{}], "prompt_token_ids"),
    "a dict of None": ([{"prompt_token_ids": None}], "prompt_token_ids"),
    "a dict of no tokens": ([{"prompt_token_ids": []}], "empty"),
    "a string without a tokenizer": (["hello"], "no tokenizer.*token ids"),
}


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_is_refused(prompts: Any, message: str, llm: LLM) -> None:
    assert_refused_and_usable(llm, lambda: llm.generate(prompts, GREEDY), message)


@pytest.mark.parametrize("prompt", ["", [""], {"prompt": ""}])
def test_an_empty_string_is_refused(prompt: Any, with_text: LLM) -> None:
    assert_refused_and_usable(with_text, lambda: with_text.generate(prompt, GREEDY), "prompt is empty")


@pytest.mark.parametrize("bad", [[], [9999], None, [1] * 32])
def test_one_bad_prompt_in_a_list_is_named_and_none_runs(bad: Any, llm: LLM) -> None:
    assert_refused_and_usable(llm, lambda: llm.generate([[1], [2], bad, [3]], GREEDY), "prompt 2")


def test_text_that_is_no_unicode_is_named(with_text: LLM) -> None:
    for prompt in ("a\ud800", {"prompt": "a\ud800"}):
        message = r"prompt 1: .*character 1 is half of a surrogate pair"
        assert_refused_and_usable(with_text, lambda prompt=prompt: with_text.generate(["ok", prompt], GREEDY), message)
    talks = [[{"role": "user", "content": text}] for text in ("ok", "\udc00")]
    assert_refused_and_usable(with_text, lambda: with_text.chat(talks, GREEDY), "conversation 1: .*surrogate")


@pytest.mark.parametrize("prompt", ["", "a\ud800", "a" * 40, [9999], [1.5], {"text": "a"}, None, b"a"], ids=repr)
def test_every_way_in_refuses_a_bad_prompt_in_the_same_words(prompt: Any, with_text: LLM) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "generate": lambda: with_text.generate([prompt], GREEDY, use_tqdm=False),
        "stream": lambda: list(with_text.stream([prompt], GREEDY)),
        "stream_tokens": lambda: list(with_text.stream_tokens(prompt, GREEDY)),
        "prepare": lambda: with_text.prepare(prompt, GREEDY),
        "add_request": lambda: with_text.add_request(prompt, GREEDY),
    }
    said = set()
    for way in ways.values():
        with pytest.raises(ValueError) as error:
            way()
        said.add(str(error.value).removeprefix("prompt 0: "))
    assert len(said) == 1


def test_a_conversation_that_is_too_long_is_named(with_text: LLM) -> None:
    talks = [[{"role": "user", "content": "a" * count}] for count in (1, 40)]
    assert_refused_and_usable(with_text, lambda: with_text.chat(talks, GREEDY), "conversation 1: .*max_model_len=32")


def test_a_tensor_or_array_is_one_prompt_or_several(llm: LLM) -> None:
    for one in (torch.tensor([5, 6]), [torch.tensor(5), torch.tensor(6)], [np.int32(5), 6]):
        (output,) = llm.generate(one, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == [5, 6]
    for several in (torch.tensor([[5], [6]]), [torch.tensor([5]), np.array([6])]):
        outputs = llm.generate(several, GREEDY, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[5], [6]]


@pytest.mark.parametrize(
    "content",
    [[{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], [5], {"type": "text", "text": 5}, 7],
    ids=str,
)
def test_a_part_of_a_message_that_is_no_text_is_refused(content: Any, with_text: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "user", "content": content}]
    assert_refused_and_usable(with_text, lambda: with_text.chat(talk, GREEDY), "message 1 .*only text")


BAD_CALLS: dict[str, tuple[Any, str]] = {
    "fewer sampling_params than prompts": ([GREEDY], "1 sampling_params for 2 prompts"),
    "more sampling_params than prompts": ([GREEDY] * 3, "3 sampling_params for 2 prompts"),
    "a dict": ({"temperature": 0, "top_k": 1}, "SamplingParams"),
    "a list of dicts": ([{"temperature": 0}] * 2, "SamplingParams"),
    "a number": (0.5, "0.5.*SamplingParams"),
    "a stop id beyond the vocabulary": (SamplingParams(stop_token_ids=[3, 500]), r"stop_token_ids.*500.*0\.\.499"),
    "a negative stop id": (SamplingParams(stop_token_ids=[-1]), r"stop_token_ids.*-1.*0\.\.499"),
    "a stop string without a tokenizer": (SamplingParams(stop="x"), "no.*tokenizer|tokenizer.*none"),
}


@pytest.mark.parametrize(("params", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_sampling_params_are_refused(params: Any, message: str, llm: LLM) -> None:
    assert_refused_and_usable(llm, lambda: llm.generate([[1], [2]], params), message)


@pytest.mark.parametrize("role", ["user", "system", "tool"])
@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_a_message_without_a_content_is_refused_by_its_number(
    message: dict[str, Any], role: str, with_text: LLM
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": role, **message}]
    with pytest.raises(ValueError, match=rf"^message 1 \({role}\) has no content"):
        with_text.chat(messages, use_tqdm=False)


@pytest.mark.parametrize("hole", [None, float("nan"), np.float64("nan")])
def test_an_empty_row_of_a_table_is_named(hole: Any, with_text: LLM) -> None:
    for call in (with_text.generate, with_text.embed):
        with pytest.raises(ValueError, match=r"^prompt 2: a prompt is .*, as a table has where a row is empty"):
            call(["a", "b", hole], use_tqdm=False)


def test_a_variable_that_the_template_does_not_read_is_told_once(
    with_text: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    given = {"enable_thinkin": False, "enable_thinking": False, "chat_template": "{{ mine }} {{ messages[0].content }}"}
    for _ in range(3):
        with_text.render_chat(messages, chat_template_kwargs=given | {"mine": 1, "tools": None})
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "the chat template does not read 'enable_thinkin'; did you mean 'enable_thinking'?"
    ]


@pytest.mark.parametrize("name", ["load_in_4bit", "load_in_8bit"])
def test_rounding_at_load_that_transformers_has_leads_to_ours(name: str) -> None:
    with pytest.raises(ValueError, match=f'{name}, which others have, .* as True: quantization="int8"'):
        LLM("tiny-qwen3", **{name: True})


@pytest.mark.parametrize("messages", [None, [], "hello", [[]], [{"content": "hi"}], [["hi"]], [None], 5])
def test_a_bad_conversation_is_refused(messages: Any, with_text: LLM) -> None:
    assert_refused_and_usable(with_text, lambda: with_text.chat(messages, GREEDY), "conversation")


def test_chat_is_refused_where_it_cannot_be(llm: LLM, reciter: Path, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}]
    assert_refused_and_usable(llm, lambda: llm.chat(talk, GREEDY), "no tokenizer")
    shutil.copytree(reciter, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(tmp_path / "tokenizer_config.json", chat_template=None)
    plain = LLM(tmp_path, **OPTIONS)
    assert_refused_and_usable(plain, lambda: plain.chat(talk, GREEDY), "no chat template")


@pytest.mark.parametrize("call", ["generate", "chat"])
def test_unknown_arguments_of_a_call_are_refused(call: str, llm: LLM) -> None:
    with pytest.raises(TypeError, match=f"{call}.. got an unexpected keyword argument 'lora_requests'"):
        getattr(llm, call)([[1]], GREEDY, lora_requests=None)


# ---- SamplingParams


BAD_VALUES: list[tuple[str, Any, str]] = [
    *(("temperature", value, "0") for value in (-0.1, math.nan, math.inf, -math.inf)),
    *(("temperature", value, "number") for value in ("hot", None, True, [1], torch.ones(2), 10**400)),
    *(("top_p", value, r"\(0, 1\]") for value in (0, 0.0, -0.5, 1.01, math.nan)),
    *(("top_p", value, "number") for value in ("0.9", None)),
    *(("min_p", value, r"\[0, 1\]") for value in (-0.01, 1.5, math.nan)),
    *(("top_k", value, "-1") for value in (-2, -100)),
    *(("top_k", value, "integer") for value in (1.5, "5", None, True, math.nan)),
    *(("max_tokens", value, "at least 1") for value in (0, -5)),
    *(("max_tokens", value, "integer") for value in (1.5, 16.0, "16", True, math.inf)),
    *(("stop", value, "string") for value in ("", [""], ["a", ""], [1], b"a", 5, [None], {"a": 1})),
    *(("stop_token_ids", value, "integer") for value in (5, [1.5], ["a"], [None], "12", [True])),
    *(("seed", value, "integer") for value in (1.5, "1", True)),
    *(("logprobs", value, "integer") for value in (1.5, "1", True)),
    ("logprobs", -1, "0 or more"),
    *(("n", value, "from 1 to 16384") for value in (0, -1)),
    *((name, value, r"\[-2, 2\]") for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, math.nan)),
    *(("repetition_penalty", value, "above 0") for value in (0, -1.5, math.nan, math.inf)),
    *(("repetition_penalty", value, "number") for value in ("1", None)),
    *(("min_tokens", value, "at least 0") for value in (-1,)),
    ("min_tokens", 65, "at most max_tokens=64"),
    *(("logit_bias", value, "dict") for value in ([1], "a", 5)),
    *(("allowed_token_ids", value, "list") for value in (5, "ab")),
    *(("bad_words", value, "strings") for value in ("ab", [""], [5], 5, [[]])),
    *((name, 0, "True or False") for name in ("detokenize", "include_stop_str_in_output")),
    *(("ignore_eos", value, "True or False") for value in ("yes", None, 2)),
    *(("skip_special_tokens", value, "True or False") for value in ("no", None)),
]


@pytest.mark.parametrize(("name", "value", "limit"), BAD_VALUES, ids=lambda value: str(value)[:20])
def test_a_sampling_value_out_of_range_is_refused(name: str, value: Any, limit: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}\b.*must be.*{limit}") as error:
        SamplingParams(**{name: value})
    shown = value[-1] if isinstance(value, list) and name != "temperature" else value
    assert repr(shown)[:20] in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 1},
        {"min_p": 0},
        {"min_p": 1},
        {"temperature": 0},
        {"max_tokens": 1},
        {"stop": []},
        {"stop": ["a", "b"]},
        {"logprobs": 0},
        {"seed": -3},
    ],
    ids=str,
)
def test_the_limits_themselves_are_allowed(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    import numpy as np

    given = SamplingParams(
        temperature=np.float32(0.5),
        top_p=torch.tensor(0.5),  # type: ignore[arg-type]
        max_tokens=np.int64(3),
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
    )
    assert given == SamplingParams(temperature=0.5, top_p=0.5, max_tokens=3, stop_token_ids=(1, 2))


def test_an_unknown_sampling_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'temprature'.*'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'max_tokenz'.*'max_tokens'"):
        SamplingParams(max_tokenz=5)  # type: ignore[call-arg]


LACKING = "best_of logits_processors truncate_prompt_tokens flat_logprobs"


@pytest.mark.parametrize("name", LACKING.split())
def test_what_vllm_has_and_we_lack_is_refused_by_name(name: str) -> None:
    for value in (5, -0.5, math.nan):
        with pytest.raises(ValueError, match=rf"\b{name}\b") as error:
            SamplingParams(**{name: value})
        assert "did you mean" not in str(error.value)


def test_vllms_neutral_and_harmless_values_change_nothing() -> None:
    neutral = {
        **{"n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        **{"min_tokens": 0, "detokenize": True, "include_stop_str_in_output": False, "prompt_logprobs": None},
        **{"logit_bias": {}, "allowed_token_ids": None, "bad_words": [], "structured_outputs": None},
        **{"guided_decoding": None, "output_kind": 2, "spaces_between_special_tokens": True, "extra_args": {}},
        **{"truncate_prompt_tokens": None, "logits_processors": None, "skip_clone": True, "flat_logprobs": False},
        "prompt_logprob_start": None,
    }
    assert SamplingParams(**neutral) == SamplingParams()
    for name, value in neutral.items():
        assert SamplingParams(**{name: value}) == SamplingParams()


def test_the_first_three_positions_are_nano_vllms_and_there_is_no_fourth() -> None:
    assert SamplingParams(0.6, 256, True) == SamplingParams(temperature=0.6, max_tokens=256, ignore_eos=True)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.6, 256, True, 50)  # type: ignore[misc]


def test_sampling_params_are_mutable_and_each_request_checks_and_copies_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0)
    params.max_tokens = 3
    request = llm.prepare([65], params)
    params.max_tokens = 5
    assert request.params == SamplingParams(temperature=0, max_tokens=3)
    params.max_tokens = 0
    assert_refused_and_usable(llm, lambda: llm.generate([[65]], params), "max_tokens.*0.*at least 1")
    params.max_tokens = 3
    params.presence_penalty = 2.5
    assert_refused_and_usable(llm, lambda: llm.generate([[65]], params), "presence_penalty.*2.5.*-2, 2")
    with pytest.raises(AttributeError, match="max_tokns"):
        params.max_tokns = 3  # type: ignore[attr-defined]


def test_sampling_params_travel() -> None:
    params = SamplingParams(0.5, None, stop=["a"], stop_token_ids=[3], seed=7)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params.clone() == params
    assert params.clone() is not params


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kvcache_block_size": 17}, "kvcache_block_size.*17.*power of two"),
        ({"kvcache_block_size": 8}, "kvcache_block_size.*8.*power of two from 16"),
        ({"kvcache_block_size": 0}, "kvcache_block_size.*0.*power of two"),
        ({"kvcache_block_size": "big"}, "kvcache_block_size.*'big'"),
        ({"max_num_seqs": 0}, "max_num_seqs.*0.*from 1 to 65536"),
        ({"max_num_seqs": 2.5}, "max_num_seqs.*2.5.*integer"),
        ({"max_num_seqs": "4"}, "max_num_seqs.*'4'.*integer"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens.*0.*from 1 to 16777216"),
        ({"num_kvcache_blocks": 2**70}, "num_kvcache_blocks.*from 1 to"),
        ({"quantization": ([],)}, "quantization.*one of"),
        ({"max_model_len": 0}, "max_model_len.*0.*at least"),
        ({"max_model_len": -1}, "max_model_len.*-1.*at least"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size.*0"),
        ({"gpu_memory_utilization": 1.7}, "gpu_memory_utilization.*1.7.*at most 1"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization.*0.*above 0"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization.*nan"),
        ({"gpu_memory_utilization": "most"}, "gpu_memory_utilization.*'most'"),
        ({"num_kvcache_blocks": 0}, "num_kvcache_blocks.*0.*at least 1"),
        ({"num_kvcache_blocks": -3}, "num_kvcache_blocks.*-3.*at least 1"),
        ({"kvcache_memory_bytes": 10**13, "num_kvcache_blocks": None}, "9313.23 GiB.*free.*kvcache_memory_bytes"),
        ({"num_kvcache_blocks": 10**9}, "GiB.*free.*num_kvcache_blocks"),
        ({"kvcache_memory_bytes": 0, "num_kvcache_blocks": None}, "kvcache_memory_bytes.*0.*at least 1"),
        ({"dtype": "float8"}, "dtype.*'float8'.*float32.*bfloat16"),
        ({"device": "tpu"}, "device.*'tpu'.*cpu"),
        ({"device": "gpu"}, "device.*'gpu'.*cpu"),
        ({"device": "cuda:99"}, "device.*cuda"),
        ({"attention_backend": "flashinfer"}, "attention_backend.*'flashinfer'.*triton"),
        ({"attention_backend": "flash_atn"}, "'flash_atn'.*did you mean 'flash_attn'"),
        ({"load_format": "pt"}, "load_format.*'pt'.*dummy"),
        ({"seed": 1.5}, "seed.*1.5.*integer"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching.*'no'.*True or False"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], message: str, random_model: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(random_model, **OPTIONS | options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"attention_backend": "flash_attn"}], ids=str)
def test_what_this_machine_lacks_is_refused(options: dict[str, str], random_model: Path) -> None:
    ((option, value),) = options.items()
    with pytest.raises(ValueError, match=f"{option}.*{value}.*auto"):
        LLM(random_model, **options)


def test_a_sampling_parameter_that_the_backend_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, random_model: Path
) -> None:
    monkeypatch.setattr(TorchBackend, "sampling_values", ("temperature", "top_k", "min_p", "seeds"))
    with LLM(random_model, **OPTIONS, attention_backend="torch") as llm:
        message = '^top_p is 0.5; it must be left out with attention_backend="torch"'
        assert_refused_and_usable(llm, lambda: llm.generate([[1]], SamplingParams(top_p=0.5)), message)
        assert len(llm.generate([[1]], SamplingParams(top_k=3, top_p=1.0, seed=1, max_tokens=4))[0]["token_ids"]) == 4


def test_the_block_size_is_the_backend_s_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3Config

    from nanovllm.backends.gpu.flash_attn_backend import FlashAttnBackend
    from nanovllm.models.sizes import Sizes
    from nanovllm.runner.resolve import resolve

    monkeypatch.setattr("nanovllm.runner.resolve.resolve_backend", lambda *_: FlashAttnBackend)
    sizes = Sizes(Qwen3Config())
    assert resolve(EngineConfig("model"), Qwen3Config(), sizes).block_size == 256
    assert resolve(EngineConfig("model", kvcache_block_size=512), Qwen3Config(), sizes).block_size == 512


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("enable_prefix_cache", "enable_prefix_caching"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(given: str, meant: str, random_model: Path) -> None:
    with pytest.raises(TypeError, match=f"'{given}'.*'{meant}'"):
        LLM(random_model, **{given: 1})


def test_only_what_is_close_is_suggested(random_model: Path) -> None:
    for name in ("parallel", "cache", "quantize", "num_blocks"):
        with pytest.raises(TypeError, match=f"'{name}'; the options are .*max_model_len") as error:
            LLM(random_model, **{name: 1})
        assert "did you mean" not in str(error.value)


VLLM_REFUSED: dict[str, Any] = {
    "skip_tokenizer_init": True,
    **{"hf_overrides": {"rope_theta": 1}, "enable_prompt_embeds": True},
    **{"generation_config": "vllm", "cpu_offload_gb": 4, "task": "classify"},
}


@pytest.mark.parametrize(("name", "value"), VLLM_REFUSED.items())
def test_an_option_of_vllms_that_would_change_something_is_refused_by_name(
    name: str, value: Any, random_model: Path
) -> None:
    with pytest.raises(ValueError, match=f"{name}, which others have, is not supported here"):
        LLM(random_model, **{name: value})


def test_one_message_serves_vllms_other_options(random_model: Path) -> None:
    for name in ("hf_token", "worker_cls", "logits_processor_pattern"):
        with pytest.raises(TypeError, match=f"'{name}'; the options are .*docs/porting.md lists the options of vLLM"):
            LLM(random_model, **{name: "auto"})


def test_vllms_and_nano_vllms_neutral_and_harmless_options_change_nothing(random_model: Path) -> None:
    harmless = {
        **{"disable_log_stats": True, "swap_space": 4, "trust_remote_code": True, "tokenizer": str(random_model)},
        **{"quantization": None, "pipeline_parallel_size": 1, "enable_chunked_prefill": False, "revision": None},
        **{"tokenizer_mode": "auto", "max_lora_rank": 16, "enable_lora": True, "load_format": "safetensors"},
        **{"compilation_config": {"level": 3}, "hf_overrides": {}, "task": "generate", "runner": "auto"},
        **{"num_kvcache_blocks": -1, "hf_config": None, "eos": -1},
    }
    assert EngineConfig.from_options(str(random_model), harmless) == EngineConfig(str(random_model))
    for name, value in {"half": "float16", "float": "float32", torch.bfloat16: "bfloat16"}.items():
        assert EngineConfig.from_options("model", {"dtype": name}).dtype == value


def test_code_from_models_never_runs_and_a_folder_that_needs_it_is_refused(checkpoint: Path, reciter: Path) -> None:
    (checkpoint / "evil.py").write_text("raise SystemExit('it ran')")
    edit_json(checkpoint / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"}, model_type="evil")
    with pytest.raises(ValueError, match=r"model_type 'evil' is not in transformers' table, and auto_map names code"):
        LLM(checkpoint, trust_remote_code=True, **OPTIONS)  # type: ignore[call-arg]
    edit_json(checkpoint / "config.json", model_type="qwen3")
    LLM(checkpoint, trust_remote_code=True, **OPTIONS).close()  # type: ignore[call-arg]
    shutil.copytree(reciter, checkpoint, dirs_exist_ok=True)
    (checkpoint / "tokenizer.json").unlink()
    edit_json(
        checkpoint / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["evil.Tokenizer", None]},
        tokenizer_class="EvilTokenizer",
    )
    with pytest.raises(ValueError, match="tokenizer"):
        LLM(checkpoint, trust_remote_code=True, **OPTIONS)  # type: ignore[call-arg]


def test_a_revision_is_for_ids_and_a_folder_is_its_own_main_branch(random_model: Path) -> None:
    assert find_model(str(random_model), "main") == random_model
    assert find_model("tiny-qwen3", "main") == find_model("tiny-qwen3")
    with pytest.raises(ValueError, match=r"revision is 'v2'.*folder"):
        LLM(random_model, revision="v2")


def test_every_option_is_documented() -> None:
    from dataclasses import fields

    assert [f.name for f in fields(EngineConfig) if not f.metadata.get("help")] == []


def test_a_pool_that_cannot_hold_max_model_len_is_refused_and_the_length_it_names_fits(random_model: Path) -> None:
    """The same for a count of blocks and for bytes: 2 (K, V) x 2 layers x 2 heads x 32 x 4 bytes a token."""
    for pool in ({"num_kvcache_blocks": 3}, {"kvcache_memory_bytes": 3 * 16 * 1024 + 500}):
        options = {**OPTIONS, "num_kvcache_blocks": None, "max_model_len": 100, **pool}
        with pytest.raises(ValueError, match=r"3 blocks of 16.*max_model_len=100.*\b48\b.*num_kvcache_blocks"):
            LLM(random_model, **options)
        with LLM(random_model, **options | {"max_model_len": 48}) as llm:
            (output,) = llm.generate([[1] * 20], SamplingParams(max_tokens=100), use_tqdm=False)
            assert len(output["token_ids"]) == 28


def test_max_model_len_is_never_beyond_the_models(random_model: Path) -> None:
    llm = LLM(random_model, **OPTIONS | {"max_model_len": 10**6, "num_kvcache_blocks": 32})
    with pytest.raises(ValueError, match=r"512.*at most 511"):
        llm.generate([[1] * 512], GREEDY)


# ---- checkpoints


@pytest.fixture
def checkpoint(random_model: Path, tmp_path: Path) -> Path:
    """A good checkpoint to break."""
    return Path(shutil.copytree(random_model, tmp_path / "model"))


def assert_not_loaded(folder: object, message: str, model_impl: str = "auto") -> None:
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        LLM(folder, model_impl=model_impl, **OPTIONS)  # type: ignore[arg-type]


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path / "nothing", "./nothing", "~/surely/nothing", "nobody/nothing", "a/b/c/d"):
        assert_not_loaded(name, f"{re.escape(str(name).split('/')[-1])}.*(not exist|neither)")


@pytest.mark.parametrize("model", [None, 5, True, ["a"], ""])
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    assert_not_loaded(model, f"model is {re.escape(repr(model))}")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert_not_loaded(tmp_path, "config.json")


def test_a_folder_without_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert_not_loaded(checkpoint, "no safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt"])
def test_only_other_formats_are_refused_by_name(name: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    assert_not_loaded(checkpoint, f"no safetensors.*{name}")


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "\xff\xfe{}", "null"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_broken_config_is_refused(name: str, content: str, checkpoint: Path) -> None:
    (checkpoint / name).write_bytes(content.encode("latin-1"))
    assert_not_loaded(checkpoint, name)


@pytest.mark.parametrize("content", ["", "{", '{"version": 1}'])
def test_a_broken_tokenizer_is_refused(content: str, reciter: Path, tmp_path: Path) -> None:
    shutil.copytree(reciter, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text(content)
    assert_not_loaded(tmp_path, "tokenizer")


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM.*Qwen3ForCausalLM.*MistralForCausalLM"),
    "another mixture of experts": (
        {"architectures": ["MixtralForCausalLM"]},
        "MixtralForCausalLM.*Qwen3MoeForCausalLM",
    ),
    "no architecture": ({"architectures": None}, "architecture.*Qwen3ForCausalLM"),
    "architectures of another type": ({"architectures": 5}, "architecture"),
    "quantization": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "bitsandbytes.*not supported.*int8",
    ),
    "a window of no tokens": (
        {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1, "layer_types": None},
        "sliding_window.*at least 1",
    ),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
    "linear attention": ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types.*linear_attention"),
    "biased MLP": ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": True}, "mlp_bias"),
    "another model_type": ({"model_type": "llama"}, 'model_type.*llama.*"qwen3", as Qwen3ForCausalLM'),
    "activation": ({"hidden_act": "gelu"}, "hidden_act.*gelu.*silu"),
    "dynamic rope": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic.*yarn"),
    "longrope": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 16,
                "long_factor": [1.0] * 16,
                "factor": 2.0,
            }
        },
        "longrope.*yarn",
    ),
    "unknown rope": ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
    "rope as before transformers 5": (
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "dynamic",
    ),
    "rope by kinds of layers": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "rope_parameters has angles for each of 'full_attention'; one table for all layers is supported",
    ),
    "yarn without factor": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
    "heads that do not divide": ({"num_attention_heads": 3}, "3.*2.*key-value"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers|layer"),
    "a size that is no number": ({"hidden_size": "wide"}, "hidden_size"),
    "an odd head_dim": ({"head_dim": 31}, "head_dim.*31|31"),
}


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_what_would_change_the_mathematics_is_refused(changes: dict[str, Any], message: str, checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", **changes)
    assert_not_loaded(checkpoint, message, model_impl="nanovllm")


def test_a_window_that_is_switched_off_is_no_window(checkpoint: Path) -> None:
    """As in published configurations: `sliding_window` may hold a number that `use_sliding_window` takes back."""
    edit_json(checkpoint / "config.json", use_sliding_window=False, sliding_window=4096, layer_types=None)
    LLM(checkpoint, **OPTIONS).close()


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.1.input_layernorm.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("name", [NORM, Q_PROJ, "model.embed_tokens.weight", "model.norm.weight"])
def test_a_missing_tensor_is_refused(name: str, checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop(name))
    assert_not_loaded(checkpoint, f"lacks.*{name}")


def test_an_untied_checkpoint_without_its_head_is_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", tie_word_embeddings=False)
    assert_not_loaded(checkpoint, "lacks.*lm_head.weight")


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra"])
def test_an_unexpected_tensor_is_refused(name: str, checkpoint: Path) -> None:
    """A third layer, a bias that config.json does not know: leaving them out would be another model."""
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.ones(128)}))
    assert_not_loaded(checkpoint, f"{name}")


@pytest.mark.parametrize("name", [NORM, Q_PROJ, "model.embed_tokens.weight"])
def test_a_wrong_shape_is_refused(name: str, checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({name: tensors[name][:-4].clone()}))
    assert_not_loaded(checkpoint, rf"{name}.*\[\d+.*config.json.*\[\d+")


def test_a_transposed_matrix_is_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].T.contiguous()}))
    assert_not_loaded(checkpoint, rf"{Q_PROJ}.*\[64, 128\].*\[128, 64\]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_weights_are_refused_also_where_the_config_hides_them(dtype: torch.dtype, checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(dtype)}))
    assert_not_loaded(checkpoint, rf"{Q_PROJ}.*(I8|F8_E4M3|int8|float8)")


@pytest.mark.parametrize("left", [0, 5, 1000, -100])
def test_a_truncated_file_is_refused(left: int, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    assert_not_loaded(checkpoint, "model.safetensors.*cannot be read")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_random(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def test_a_missing_shard_is_refused_by_name(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert_not_loaded(sharded, f"lacks.*{shard.name}")


def test_a_missing_shard_is_refused_without_the_index_too(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    assert_not_loaded(sharded, "lacks")


def test_a_truncated_shard_is_refused_by_name(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert_not_loaded(sharded, f"{shard.name}.*cannot be read")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 5}'])
def test_a_broken_index_is_refused(content: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert_not_loaded(sharded, "model.safetensors.index.json")


def test_a_failed_load_does_not_stand_in_the_way_of_the_next(checkpoint: Path, random_model: Path) -> None:
    default = torch.get_default_dtype()
    edit_json(checkpoint / "config.json", num_hidden_layers=3, layer_types=None)
    with pytest.raises(ValueError, match="lacks"):
        LLM(checkpoint, **OPTIONS | {"dtype": "bfloat16"})
    assert torch.get_default_dtype() == default
    assert json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"] == 3
    LLM(random_model, **OPTIONS).close()


ELSEWHERE = {
    "jobs": {"logprobs", "prompt_logprobs", "structured_outputs", "prompt_logprob_start", "embed", "detokenize"},
    "hostile values": {"prompt_logprobs", "prompt_logprob_start", "embed", "structured_outputs"},
    "the mix": {"prompt_logprob_start", "embed", "detokenize"},
}
"""The parameters for which steps 5 and 6 of the recipe in docs/recipes.md have another place than the usual one.

Jobs have fields of OpenAI's for the first three, and no line may ask for the others. The tests of scores and vectors
have values of their own."""


def test_a_sampling_parameter_is_where_its_recipe_puts_it() -> None:
    from nanovllm.apps.jobs.request_lines import _SAMPLING as SAMPLING_OF_LINES

    names = {field.name for field in fields(SamplingParams)}
    mix = (TESTS / "engine" / "test_combinations.py").read_text()
    found = {
        "jobs": {*SAMPLING_OF_LINES},
        "hostile values": {name for name, *_ in BAD_VALUES},
        "the mix": {name for name in names if re.search(rf"\b{name}\b", mix)},
    }
    for place, there in found.items():
        assert names - there == ELSEWHERE[place], f"{place}: see the recipe for a sampling parameter"
    page = (ROOT / "docs" / "batch.md").read_text()
    assert [name for name in SAMPLING_OF_LINES if f"`{name}`" not in page] == []
