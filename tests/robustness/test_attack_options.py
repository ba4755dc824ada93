"""Attacks on options and arguments: whatever is passed, the answer is an engine that works or an error that says why.

An error is a ValueError, comes soon, and quotes at most 200 characters of a value. Sizes are tried under a limit of
memory, so that one that is taken for granted fails.
"""

import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.batch_jobs import write_lines
from helpers.hostile_options import HUGE, OPTIONS, Awkward, short
from helpers.integrity import check_scheduler
from helpers.paths import BOX_MODEL, ROOT
from helpers.warm import WarmPython

from nanovllm import LLM, SamplingParams
from nanovllm.apps.cli import main
from nanovllm.apps.jobs.job import Status

VALUES: list[Any] = [
    *(
        0,
        1,
        -1,
        2,
        True,
        False,
        None,
        1.5,
        -0.0,
        1e-320,
        1e308,
        math.nan,
        math.inf,
        -math.inf,
        HUGE,
        -HUGE,
        2**31,
        2**63,
    ),
    *(
        "1",
        "",
        b"x",
        [],
        [1],
        {},
        {"a": 1},
        (1,),
        {1, 2},
        range(3),
        1 + 2j,
        object(),
        Awkward(),
        "\ud800",
        "x" * 100_000,
    ),
    *(
        np.int64(3),
        np.float32(0.5),
        np.array([1, 2]),
        torch.tensor(1.0),
        torch.tensor([1, 2]),
        [None],
        ["a", ""],
        ["a"],
    ),
]
FIELDS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "ignore_eos", "stop", "stop_token_ids", "seed")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-qwen3", **OPTIONS) as engine:
        yield engine


def test_any_sampling_parameters_work_or_are_refused_with_a_short_reason(llm: LLM) -> None:
    draw = random.Random(0)
    for _ in range(300):
        given = {name: draw.choice(VALUES) for name in draw.sample([*FIELDS, "logprobs"], draw.choice([1, 1, 2]))}
        try:
            params = SamplingParams(**given)
            params.max_tokens = min(params.max_tokens or 8, 8)
            (output,) = llm.generate(["the"], params, use_tqdm=False)
        except ValueError as error:
            assert short(error), given
        else:
            assert 1 <= len(output["token_ids"]) <= 8


PROMPTS: list[Any] = [
    *("", "a", "\0", "\ud800", "x" * 300, [], [0], [664], [-1], [2**63], [HUGE], [True], [1.0], [None], ["a", 1]),
    *(np.array([1, 2]), np.array([1.0]), np.array([[1]]), torch.tensor([1, 2]), {}, {"prompt": None}, {"prompt": [1]}),
    *({"prompt_token_ids": "a"}, {"prompt": {"prompt": "a"}}, {"prompt": "a", "x": 1}, None, 5, object(), Awkward()),
    *(b"abc", range(3), (1, 2), [[[]]], [1] * 63, [1] * 64, {"a"}, memoryview(b"ab"), "<|im_end|>", 1 + 2j),
]


def test_any_prompt_runs_or_is_refused_and_the_engine_stays_whole(llm: LLM) -> None:
    draw = random.Random(0)
    greedy = SamplingParams(temperature=0, max_tokens=3)
    expected = llm.generate(["the"], greedy, use_tqdm=False)[0]["token_ids"]
    for _ in range(200):
        prompts = draw.choice(PROMPTS) if draw.random() < 0.5 else draw.choices(PROMPTS, k=draw.randint(0, 3))
        params = draw.choice([greedy, [greedy] * 2, [None] * 2, "x", 5, {}])
        try:
            llm.generate(prompts, params, use_tqdm=False)
        except ValueError as error:
            assert short(error)
        check_scheduler(llm.engine.scheduler)
    assert llm.generate(["the"], greedy, use_tqdm=False)[0]["token_ids"] == expected


CONVERSATIONS: list[Any] = [
    *([], None, "x", 5, [{}], [None], [[None]], [5], [[5]], {"role": "user", "content": "a"}),
    *([{"role": "user", "content": content}] for content in ("a", None, 5, "\ud800", [], [5], [{"type": "text"}], {})),
    *([{"role": role, "content": "a"}] for role in (None, 5, [], {}, "wizard")),
    *([{"role": "user"}], [{"content": "a"}], [[{"role": "user", "content": "a"}], []]),
]


def test_any_conversation_runs_or_is_refused(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=2)
    templates = (None, {}, {"chat_template": "{{ 1/0 }}"}, {"chat_template": 5}, {"tokenize": True}, 5, "x", [("a", 1)])
    for messages in CONVERSATIONS:
        for kwargs in templates:
            try:
                llm.chat(messages, greedy, chat_template_kwargs=kwargs, use_tqdm=False)  # type: ignore[arg-type]
            except ValueError as error:
                assert short(error), (messages, kwargs)


TRY_CONFIGS = """
import sys, time
sys.path.insert(0, "tests")
from helpers.hostile_options import CONFIGS, try_config
for name, values in CONFIGS.items():
    for value in values:
        since = time.perf_counter()
        said = try_config(name, value)
        seconds = time.perf_counter() - since
        if said or seconds > 100:
            print(name, str(value)[:30], said, round(seconds, 1))
"""


@pytest.mark.slow
def test_any_option_makes_an_engine_or_a_short_reason_soon(warm_python: WarmPython) -> None:
    """In a process that may use 12 GiB of addresses."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))\n"
    done = warm_python.run(limit + TRY_CONFIGS, cwd=ROOT, seconds=1200)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


@pytest.mark.parametrize(
    "options",
    [
        ["--kvcache-memory-bytes", "10000000000000"],
        ["--max-num-seqs", str(2**63)],
        ["--max-num-seqs", str(10**9)],
        ["--max-num-batched-tokens", str(2**63)],
        ["--num-kvcache-blocks", str(10**12)],
        ["--model", "~nosuchuser/x"],
        ["--model", "a" * 300],
        ["--served-model-name", "\ud800"],
        ["--trace", "a" * 300],
    ],
    ids=str,
)
def test_a_command_that_cannot_be_run_ends_with_status_2_and_without_a_traceback(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "x", "max_tokens": 1}])
    since = time.monotonic()
    command = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--model", "tiny-qwen3"]
    status = main([*command, "--max-model-len", "64", *options])
    said = capsys.readouterr().err
    assert status in ((Status.USAGE, Status.OK) if "served" in options[0] else (Status.USAGE,)), said
    assert "Traceback" not in said and time.monotonic() - since < 200
    for line in said.splitlines():
        assert len(line) < 1000


def test_a_trace_that_cannot_be_written_any_more_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM("tiny-qwen3", **OPTIONS, trace="/dev/full") as llm:
        (output,) = llm.generate(["the"], SamplingParams(max_tokens=40, ignore_eos=True))
    assert len(output["token_ids"]) == 40 and "cannot be written" in caplog.text
    with LLM("tiny-qwen3", **OPTIONS, trace=str(tmp_path / "trace")) as llm:
        llm.generate(["the"], SamplingParams(max_tokens=2))
    assert json.loads((tmp_path / "trace").read_text())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intermediate_size": 10**12}, "intermediate_size is 1000000000000; it must be at most"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; it must be at most"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"architectures": ["x" * 10_000]}, "names 'xxx"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_configuration_that_no_machine_holds_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(BOX_MODEL / name, tmp_path)
    config = json.loads((BOX_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=words) as refused:
        LLM(str(tmp_path), **OPTIONS)
    assert len(str(refused.value)) < 1000


def test_a_deep_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="cannot be read"):
        LLM(str(tmp_path), **OPTIONS)
