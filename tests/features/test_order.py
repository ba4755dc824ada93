"""Requests that are known in advance run in the order that ends soonest, and say what they say in the given order."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from helpers.fakes import VOCAB, expected_tokens, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, Output, SamplingParams
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.engine import admission
from nanovllm.engine.admission import LINES_AHEAD, Admission, Candidate, SoonestOrder, put_longest_first, sort_by_prefix
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Request, derive_seed

BLOCK = 4


def as_bytes(prompt: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in prompt)


def make_candidates(prompts: list[list[int]], lengths: list[int]) -> list[Candidate]:
    return [Candidate((i, []), i, as_bytes(p), n, 64) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]


def sort(candidates: list[Candidate], num_blocks: int, max_num_seqs: int = 4, last: bytes = b"") -> list[Candidate]:
    options = {"block_size": BLOCK, "max_num_seqs": max_num_seqs, "max_model_len": 64, "enable_prefix_caching": True}
    return sort_by_prefix(candidates, SimpleNamespace(**options), num_blocks, last)  # type: ignore[arg-type]


def list_numbers(candidates: list[Candidate]) -> list[int]:
    return [one.number for one in candidates]


def common_blocks(one: bytes, other: bytes) -> int:
    blocks = range(min(len(one), len(other)) // (4 * BLOCK))
    differing = (i for i in blocks if one[: 4 * BLOCK * (i + 1)] != other[: 4 * BLOCK * (i + 1)])
    return next(differing, len(blocks))


prompts_of_few_blocks = st.lists(
    st.lists(st.sampled_from([[1] * BLOCK, [2] * BLOCK, [3] * BLOCK, [4]]), min_size=1, max_size=5).map(
        lambda blocks: [token for block in blocks for token in block]
    ),
    min_size=1,
    max_size=24,
)


# ---- the order


@given(st.lists(st.integers(0, 9), min_size=1, max_size=24))
def test_of_the_last_ones_the_longest_come_first_and_the_others_stay(lengths):
    """The last ones have outputs of at most four times the longest, for four rows."""
    candidates = make_candidates([[1]] * len(lengths), lengths)
    numbers = list_numbers(put_longest_first(candidates, 4, 1000))
    if len(set(lengths)) == 1:
        assert numbers == list(range(len(lengths)))
        return
    most = min(4, len(lengths)) * max(lengths)
    num_late = max(n for n in range(len(lengths) + 1) if sum(lengths[len(lengths) - n :]) <= most)
    num_early = len(lengths) - num_late
    assert numbers[:num_early] == list(range(num_early))
    assert numbers[num_early:] == sorted(range(num_early, len(lengths)), key=lambda i: (-lengths[i], i))
    num_slots = sum(1 + length for length in sorted(lengths)[-4:])  # each with the one token of its prompt
    assert list_numbers(put_longest_first(candidates, 4, num_slots)) == numbers
    assert list_numbers(put_longest_first(candidates, 4, num_slots - 1)) == list(range(len(lengths)))


@given(prompts_of_few_blocks)
def test_in_a_pool_without_room_each_block_is_computed_once(prompts):
    """Neighbours share what can be shared: only the blocks of the prompt before are in the cache."""
    ordered = [one.prompt for one in sort(make_candidates(prompts, [1] * len(prompts)), 0)]
    num_computed = len(ordered[0]) // (4 * BLOCK)
    num_computed += sum(len(b) // (4 * BLOCK) - common_blocks(a, b) for a, b in pairwise(ordered))
    distinct = {p[: 4 * BLOCK * i] for p in ordered for i in range(1, len(p) // (4 * BLOCK) + 1)}
    assert sorted(ordered) == sorted(map(as_bytes, prompts))
    assert num_computed == len(distinct)


@given(prompts_of_few_blocks)
def test_in_a_pool_with_room_for_all_the_given_order_stays(prompts):
    candidates = make_candidates(prompts, [1] * len(prompts))
    assert list_numbers(sort(candidates, 10_000)) == list(range(len(prompts)))


def test_the_largest_group_comes_first_and_those_that_share_nothing_last():
    a, b, c = ([i] * BLOCK for i in (1, 2, 3))
    prompts = [[5] * 6, [*a, 1], [*b, 1], c, [*b, 2], [6] * 6, [*a, 2], [*b, 3]]
    candidates = make_candidates(prompts, [1, 2, 3, 4, 5, 6, 7, 8])
    assert list_numbers(sort(candidates, 1, max_num_seqs=1)) == [2, 4, 7, 1, 6, 0, 3, 5]
    assert [one.reason for one in candidates[:2]] == ["in turn", "by prefix: 2 share 1 blocks"]
    assert list_numbers(sort(candidates, 1, max_num_seqs=1, last=as_bytes([*a, 9]))) == [1, 6, 2, 4, 7, 0, 3, 5]


# ---- in an engine without a model


def prepare(engine: LLMEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Request]:
    return [engine.prepare(prompt, one) for prompt, one in zip(prompts, params, strict=True)]


def run_list(engine: LLMEngine, requests: list[Request]) -> dict[int, Any]:
    """Run a list as `LLM.run_requests` does; return the sequences by their numbers in the given order."""
    order = SoonestOrder(engine, requests)
    return {order.take_number(seq): seq for ended in engine.run(order) for seq in ended}


@settings(max_examples=60)
@given(prompts_of_few_blocks, st.randoms(use_true_random=False), st.sampled_from([(8, 1), (9, 2), (64, 2)]))
def test_numbers_seeds_and_tokens_are_those_of_the_given_order(prompts, draw, pool):
    num_blocks, depth = pool
    params = [SamplingParams(max_tokens=draw.randint(1, 10), n=draw.randint(1, 3)) for _ in prompts]
    engine = make_engine(num_blocks=num_blocks, depth=depth)
    first = run_list(engine, prepare(engine, prompts, params))
    second = run_list(engine, prepare(engine, prompts, params))
    assert sorted(first) == sorted(second) == list(range(len(prompts)))
    next_id = 0
    for count, seqs in enumerate((first, second)):
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            seed = derive_seed(0, count * len(prompts) + number)
            lead = seqs[number]
            assert [seq.seq_id for seq in (lead, *lead.others)] == list(range(next_id, next_id + one.n))
            next_id += one.n
            for i, seq in enumerate((lead, *lead.others)):
                drawn = seed if i == 0 else derive_seed(seed, i)
                tokens, reason = expected_tokens(prompt, one, drawn, frozenset(), 32)
                assert (seq.output_token_ids, seq.finish_reason) == (tokens, reason)


def test_64_shuffled_prefixes_are_computed_about_as_rarely_as_sorted_ones():
    """2,000 requests share 64 prefixes of 1,000 tokens, and the pool has room for 16 of these."""
    draw = random.Random(0)
    prefixes = [[draw.randrange(VOCAB) for _ in range(1000)] for _ in range(64)]
    prompts = [prefixes[i % 64] + [draw.randrange(VOCAB) for _ in range(20)] for i in range(2000)]
    params = [SamplingParams(max_tokens=draw.randint(1, 6)) for _ in prompts]
    computed = []
    for given_prompts in (sorted(prompts), draw.sample(prompts, 2000)):
        engine = make_engine(
            num_blocks=256, block_size=64, max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=1100
        )
        run_list(engine, prepare(engine, given_prompts, params))
        computed.append(engine.runner.num_tokens_computed)  # type: ignore[attr-defined]
    assert computed[1] <= 1.1 * computed[0]


def test_where_nothing_tells_the_lengths_the_given_order_stays():
    engine = make_engine(max_num_seqs=4, num_blocks=64)
    lines = [(i, [engine.prepare([i % 16] * (1 + i % 7), SamplingParams(max_tokens=9))]) for i in range(40)]
    assert [number for number, _ in Admission(engine, is_list=True).reorder(lines)] == list(range(40))


def test_max_tokens_tell_the_lengths():
    engine = make_engine(max_num_seqs=2, num_blocks=64)
    limits = [1, 9, 2, 3, 4, 5, 6, 7, 8, 1, 2, 8, 1, 4]
    lines = [(n, [engine.prepare([1, 2], SamplingParams(max_tokens=n))]) for n in limits]
    order = [number for number, _ in Admission(engine, is_list=True).reorder(lines)]
    assert order == [*limits[:9], 8, 4, 2, 1, 1]  # the last five have 16 tokens together; two times 9 are allowed


def test_a_long_job_keeps_nothing_of_the_lines_that_it_has_handed_on(monkeypatch):
    """And a line is sorted a few times, however long the job is."""

    class Item:
        """Stands for what the caller knows a line by."""

    engine = make_engine(max_num_seqs=2, num_blocks=8)
    kept: WeakSet[Item] = WeakSet()
    num_sorted = []
    original = admission.sort_by_prefix

    def read():
        for number in range(2000):
            item = Item()
            kept.add(item)
            yield item, [engine.prepare([number % 3] * 5, SamplingParams(max_tokens=1))]
            assert len(kept) <= 2 + LINES_AHEAD * 2

    def count(candidates, *others):
        num_sorted.append(len(candidates))
        return original(candidates, *others)

    monkeypatch.setattr(admission, "sort_by_prefix", count)
    assert sum(1 for _ in Admission(engine).reorder(read())) == 2000
    assert sum(num_sorted) <= 6 * 2000


def test_a_job_takes_what_is_ready_and_reads_no_further_than_it_may():
    engine = make_engine(max_num_seqs=2)
    params = SamplingParams(max_tokens=1)
    num_read = 0

    def read(ready):
        nonlocal num_read
        for number in range(100):
            if not ready(number):
                yield None
            num_read += 1
            yield number, [engine.prepare([1, number % 16], params)]

    order = []
    for number, _ in Admission(engine).reorder(read(lambda number: True)):
        order.append(number)
        assert num_read - len(order) <= LINES_AHEAD * 2
    assert sorted(order) == list(range(100))
    num_read = 0
    taken = Admission(engine).reorder(read(lambda number: number < 20))
    assert [next(taken)[0] for _ in range(3)] == [0, 1, 2]
    assert num_read == 22  # 20 were ready; then one was awaited for each that was taken, but the last


@pytest.mark.parametrize("seed", range(3))
def test_a_job_begins_with_the_shortest_line_that_was_read_and_takes_no_step_more(seed, monkeypatch):
    draw = random.Random(seed)
    lengths = [draw.randint(2, 9) for _ in range(90)]
    lengths[draw.randrange(LINES_AHEAD * 4)] = 1
    num_steps = []
    for put_first in (admission.put_shortest_first, lambda candidates: candidates):
        monkeypatch.setattr(admission, "put_shortest_first", put_first)
        engine = make_engine(max_num_seqs=4, num_blocks=64)
        requests = prepare(engine, [[1, 2]] * 90, [SamplingParams(max_tokens=n) for n in lengths])
        order = [number for number, _ in Admission(engine).reorder((i, [r]) for i, r in enumerate(requests))]
        assert sorted(order) == list(range(90))
        begins_with_shortest = lengths[order[0]] == 1
        assert begins_with_shortest == (not num_steps)  # the first of the two ways
        num_steps.append(sum(1 for _ in engine.run(requests[number] for number in order)))
    assert num_steps[0] <= num_steps[1]


def test_long_prompts_are_read_ahead_up_to_a_number_of_bytes_and_one_line(monkeypatch):
    monkeypatch.setattr(admission, "TOKENS_AHEAD", 100)
    engine = make_engine(max_num_seqs=2)
    held = 0

    def read():
        nonlocal held
        for number in range(60):
            prompt = [number % 16] * (1 + number % 30)
            request = engine.prepare(prompt, SamplingParams(max_tokens=1))
            assert held < 4 * 100, "another line is read only below the limit"
            held += len(request.prompt_token_ids.tobytes())
            yield len(request.prompt_token_ids.tobytes()), [request]

    num_taken = 0
    for size, _ in Admission(engine).reorder(read()):
        held -= size
        num_taken += 1
    assert num_taken == 60 and held == 0


@pytest.mark.parametrize("replicas", [1, 3])
def test_with_replicas_the_end_begins_when_their_rows_together_can_hold_it(replicas):
    engine = make_engine(max_num_seqs=2)
    lengths = list(range(1, 31))
    requests = prepare(engine, [[1, 2]] * 30, [SamplingParams(max_tokens=n) for n in lengths])
    engine.config = replace(engine.config, data_parallel_size=replicas)
    ordered = [taken for taken, _ in Admission(engine, is_list=True).reorder((n, [r]) for n, r in enumerate(requests))]
    num_late = next(n for n in range(31) if sum(lengths[-n - 1 :]) > 30 * 2 * replicas)
    assert ordered == [*range(30 - num_late), *range(29, 29 - num_late, -1)]


def test_the_trace_tells_why_a_request_was_admitted(tmp_path):
    engine = make_engine(max_num_seqs=2, trace=str(tmp_path / "run.json"))
    requests = prepare(engine, [[1, 2]] * 9, [SamplingParams(max_tokens=n) for n in range(1, 10)])
    run_list(engine, requests)
    engine.close()
    plans = [e["args"] for e in json.loads((tmp_path / "run.json").read_text()) if e["name"] == "plan"]
    reasons = {number: reason for plan in plans for number, reason in plan.get("reasons", [])}
    assert reasons[0] == "in turn"
    assert reasons[8] == "longest first: max_tokens 9"


# ---- in whole engines


@pytest.fixture(scope="module")
def kernels() -> None:
    if reason := CpuBackend.why_cannot(torch.device("cpu")):
        pytest.skip(reason)


def spy_on_admission(llm: LLM) -> list[int]:
    """Return a list that gets the number of each sequence that is admitted."""
    admitted: list[int] = []
    table = llm.engine.scheduler.table
    move_in = table.move_in

    def note(seq: Any, num_cached: int) -> None:
        admitted.append(seq.seq_id)
        move_in(seq, num_cached)

    table.move_in = note  # type: ignore[method-assign]
    return admitted


def strip(output: Output) -> Any:
    return [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs] + [
        output.prompt_token_ids,
        output.prompt_logprobs,
    ]


TINY: dict[str, Any] = {"dtype": "float32", "attention_backend": "cpu", "kvcache_block_size": 16, "max_model_len": 128}
CROWDED = TINY | {"num_kvcache_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 40}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="preempted"),
        pytest.param({"speculative_config": NGRAM}, id="with drafts", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_every_bit_is_that_of_the_given_order(more):
    draw = random.Random(1)
    prefixes = [[draw.randrange(600) for _ in range(32)] for _ in range(4)]
    prompts = [prefixes[i % 4] + [draw.randrange(600) for _ in range(draw.randint(1, 30))] for i in range(24)]
    params = [
        SamplingParams(temperature=0.8, max_tokens=draw.randint(1, 50), n=draw.choice([1, 1, 3]), logprobs=2)
        for _ in prompts
    ]
    params[5:8] = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 50, 20)]
    for i in (3, 9, 20):
        params[i] = SamplingParams(0.9, 30, structured_outputs={"regex": "[a-f]{3,40}"}, logprobs=1)
    found = []
    for order in ("given", "auto"):
        with LLM("tiny-qwen3", order=order, **CROWDED, **more) as llm:
            admitted = spy_on_admission(llm)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm.stats()["num_preemptions"] > 0
            scores = llm.score(prompts, [[1, 2]] * len(prompts), use_tqdm=False)
            vectors = [v.embedding.tobytes() for v in llm.embed(prompts, use_tqdm=False)]
            found.append(([strip(output) for output in outputs], scores, vectors))
            is_sorted = admitted[:4] == [0, 1, 2, 3]
            assert is_sorted == (order == "given")
    assert found[0] == found[1]


def test_only_lists_are_reordered():
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (6, 2, 1, 1, 2, 1)]
    prompts = [[7, i] for i in range(6)]
    options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 64, "num_kvcache_blocks": 8, "device": "cpu"}
    with LLM("tiny-qwen3", **options) as llm:
        admitted = spy_on_admission(llm)
        expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert admitted == [0, 1, 4, 2, 3, 5]  # the last four have 5 tokens of output, with the second it were 7
        del admitted[:]
        streamed = dict(llm.stream(zip(prompts, params, strict=True)))
        assert [streamed[i].token_ids for i in range(6)] == expected
        assert admitted == list(range(6, 12))
        del admitted[:]
        futures = [llm.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        assert [future.result().token_ids for future in futures] == expected
        assert admitted == list(range(12, 18))
        del admitted[:]
        numbers = [llm.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        while not llm.is_finished():
            llm.step()
        assert admitted == numbers
    with LLM("tiny-qwen3", order="given", **options) as llm:
        admitted = spy_on_admission(llm)
        assert [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == expected
        assert admitted == list(range(6))
    with pytest.raises(ValueError, match="order is 'longest'"):
        LLM("tiny-qwen3", order="longest", **options)


@pytest.mark.slow
def test_a_file_of_requests_gives_the_results_of_the_given_order(tmp_path: Path):
    from nanovllm.apps.jobs.job import Job, Status
    from nanovllm.apps.jobs.run import run_job
    from nanovllm.config import EngineConfig

    draw = random.Random(2)
    lines = [
        {"prompt": [draw.randrange(9) + 5] * 64 + [i % 600, 7], "max_tokens": draw.randint(1, 9), "temperature": 0.9}
        for i in range(40)
    ]
    lines.insert(9, {"prompt": "x" * 9, "top_p": 7})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {}
    for order in ("given", "auto"):
        config = EngineConfig(
            "tiny-qwen3",
            max_model_len=96,
            max_num_seqs=2,
            num_kvcache_blocks=12,
            kvcache_block_size=16,
            device="cpu",
            dtype="float32",
            order=order,
        )
        job = Job(
            str(tmp_path / "in.jsonl"), str(tmp_path / order), config, "tiny-qwen3", stats=str(tmp_path / "stats")
        )
        assert run_job(job) == Status.LINES_FAILED
        answers = [json.loads(line) for line in (tmp_path / order).read_text().splitlines()]
        stats = json.loads((tmp_path / "stats").read_text())
        texts = {a["id"]: a["error"] or a["response"]["body"]["choices"] for a in answers}
        found[order] = (texts, stats["num_cached_tokens"])
        assert len(texts) == len(answers) == len(lines)
    assert found["auto"][0] == found["given"][0]
    assert found["auto"][1] > 1.5 * found["given"][1]
