"""A pipeline of processes: the same bits as one rank, a trace of all ranks, and nobody waits for the dead."""

import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.integrity import check_scheduler
from helpers.stages import ctrl_c_at_launch, resolve_with_overlap
from helpers.tiny import draw_prompts, save_random

from nanovllm import LLM, SamplingParams
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.features.distributed.collectives import GroupParallel

SOON = 50.0
"""Seconds within which a failure must show."""
BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * 16
"""Of the heavier stage: keys and values of 2 layers, 2 heads of 32 float32 numbers, 16 tokens."""
NUM_BLOCKS = 12
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "attention_backend": "torch" if CpuBackend.why_cannot(torch.device("cpu")) else "cpu",
    "max_model_len": 160,
    "kvcache_block_size": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three-layers")
    save_random(folder, num_hidden_layers=3)
    return folder


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "run.json"


@pytest.fixture(scope="module")
def two(model: Path, trace: Path) -> Iterator[LLM]:
    """With memory for the layers of the heavier stage: the other has room for twice as many blocks."""
    memory = {"kvcache_memory_bytes": NUM_BLOCKS * BLOCK_BYTES, "trace": str(trace)}
    with LLM(str(model), pipeline_parallel_size=2, **OPTIONS | memory) as llm:
        yield llm


def generate(llm: LLM) -> list[Any]:
    """Greedy, seeded and scored requests; some prompts are longer than a step's budget, some share a prefix."""
    prefix, *rest = draw_prompts([40, 1, 15, 16, 17, 31, 70, 100, 5, 9])
    prompts = [*rest, *(prefix + tail for tail in draw_prompts([1, 8, 20], seed=1)), prefix]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.8, "top_p": 0.95, "prompt_logprobs": 1},
        {"temperature": 1.0, "n": 2, "frequency_penalty": 0.5},
    ]
    params = [
        SamplingParams(**{"seed": i, "max_tokens": 30, "ignore_eos": True} | kinds[i % 3]) for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        ([(one.token_ids, one.logprobs) for one in output.outputs], output.get("prompt_logprobs")) for output in outputs
    ]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    with LLM(str(model), num_kvcache_blocks=64, **OPTIONS) as llm:
        return generate(llm)


def strip(outputs: list[Any]) -> list[Any]:
    """Only the token ids, which are all that plain torch promises."""
    return [[one[0] for one in completions] for completions, _ in outputs]


def test_two_processes_give_the_bits_of_one(two: LLM, expected: list[Any]) -> None:
    found = generate(two)
    if OPTIONS["attention_backend"] == "cpu":
        assert found == expected
    assert strip(found) == strip(expected)
    stats = two.stats()
    assert stats["num_preemptions"] > 0 and stats["num_cached_tokens"] > 0
    assert stats["num_free_blocks"] == stats["num_blocks"] == NUM_BLOCKS, "the heavier stage decides"
    check_scheduler(two.engine.scheduler)


@pytest.mark.slow
def test_leaving_and_ctrl_c_with_steps_in_flight_leave_two_processes_whole(two: LLM, expected: list[Any]) -> None:
    stream = two.stream(([1, 2, number], SamplingParams(max_tokens=9 + number)) for number in range(9))
    next(stream)
    assert two.engine._in_flight
    stream.close()  # type: ignore[attr-defined]
    with ctrl_c_at_launch(two, 5):
        generate(two)
    assert strip(generate(two)) == strip(expected)


def test_the_trace_shows_what_each_rank_did(two: LLM, trace: Path, tmp_path: Path) -> None:
    from nanovllm.apps.cli import main

    two.generate([[1, 2, 3]] * 6, SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    lines = trace.read_text().splitlines()[1:]
    events = [json.loads(line.rstrip(",")) for line in lines]
    ranks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and ranks[event["tid"]].startswith("rank"):
            spans[ranks[event["tid"]], event["name"]].append(event)
    assert spans.keys() == {
        *(("rank 0", name) for name in ("layers", "receive", "head")),
        *(("rank 1", name) for name in ("layers", "receive")),
    }
    steps = range(1, two.stats()["num_steps"] + 1)
    assert [event["args"]["step"] for event in spans["rank 0", "layers"]] == [*steps]
    seen = [event["args"]["step"] for event in spans["rank 1", "layers"]]
    assert seen == [*range(1, len(seen) + 1)] and len(seen) >= len(steps) - 2
    for own in spans.values():
        ends = [event["ts"] + event["dur"] for event in own]
        starts = [event["ts"] for event in own]
        assert all(end <= start + 1 for end, start in zip(ends, starts[1:], strict=False)), "a rank does one thing"
    assert main(["view", str(trace), "-o", str(tmp_path / "page.html")]) == 0


def expect_the_end(llm: LLM, message: str) -> None:
    since = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        while time.monotonic() < since + SOON:
            llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert time.monotonic() < since + SOON
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.generate([[1]], use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "overlaps"), [(1, False), (2, True)])
def test_a_stage_that_dies_while_the_others_wait_for_it_is_named(
    rank: int, overlaps: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for rank 2, and rank 2 for rank 1: with p = 3 these are all links but the first."""
    if overlaps:
        monkeypatch.setattr("nanovllm.features.distributed.options.resolve_ranks", resolve_with_overlap)
    llm = LLM(str(model), pipeline_parallel_size=3, num_kvcache_blocks=24, **OPTIONS)
    victim = llm.engine.runner.pids[rank - 1]
    os.kill(victim, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
    expect_the_end(llm, f"rank {rank} of 3 failed: its process {victim} was killed by SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [False, True])
def test_closing_with_steps_in_flight_waits_for_nobody(
    overlaps: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if overlaps:
        monkeypatch.setattr("nanovllm.features.distributed.options.resolve_ranks", resolve_with_overlap)
    llm = LLM(str(model), pipeline_parallel_size=2, num_kvcache_blocks=24, **OPTIONS)
    pids = llm.engine.runner.pids
    stream = llm.stream(([1, 2, number], SamplingParams(max_tokens=9 + number)) for number in range(9))
    next(stream)
    assert len(llm.engine._in_flight) == 1 + overlaps
    since = time.monotonic()
    llm.close()
    assert time.monotonic() < since + SOON
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_that_all_send_before_they_receive_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Three ranks in a circle, in three threads. Each sends more than a socket holds, several times."""
    found: dict[int, list[float]] = {}

    def run(rank: int) -> None:
        group = GroupParallel(rank, 3, "gloo", torch.device("cpu"))
        group.connect(tmp_path)
        sent = [group.start_send(torch.full((4 << 20,), 10.0 * rank + i), (rank + 1) % 3) for i in range(3)]
        received = []
        for _ in sent:
            x = group.receive((4 << 20,), torch.float32, (rank - 1) % 3)
            received.append(float(x[0]))
            assert torch.equal(x, x[:1].expand_as(x))
        for one in sent:
            assert one is not None
            group.end_send(one)
        found[rank] = received
        group.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == {rank: [10.0 * ((rank - 1) % 3) + i for i in range(3)] for rank in range(3)}
