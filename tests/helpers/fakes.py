"""A device without a model: it does to caches and rows what plans say, and its next token depends on all before it."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from nanovllm.config import ResolvedConfig
from nanovllm.engine.block_manager import BlockManager, prefix_digest
from nanovllm.engine.llm_engine import LLMEngine, ModelFacts
from nanovllm.engine.order import Order
from nanovllm.engine.output import list_prompt_logprobs
from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.engine.token_scores import TokenScores
from nanovllm.sampling_params import SamplingParams

VOCAB = 16


def state_after(state: int, token_id: int) -> int:
    """Return the state of the model after one more token: a digest of all tokens so far."""
    return xxhash.xxh3_64_intdigest(state.to_bytes(8, "little") + token_id.to_bytes(4, "little"))


def next_token(state: int, seed: int) -> int:
    return (state ^ seed) % VOCAB


def score(state: int, token_id: int) -> float:
    """Return a number that stands for the log-probability of a token after others."""
    return float((state ^ token_id) % 1009)


def three_bit_digest(parent: bytes, tokens: bytes) -> bytes:
    """Return a digest of 3 bits, so that collisions are frequent."""
    return bytes([prefix_digest(parent, tokens)[0] & 7])


class FakeHandle:
    def __init__(self, runner: "FakeRunner", token_ids: np.ndarray, scores: list[float]) -> None:
        self._runner = runner
        self._token_ids = token_ids
        self._scores = scores

    def result(self) -> StepResult:
        assert self._runner.unread.popleft() is self, "steps are read in the order of their launch"
        scores = TokenScores.allocate(len(self._scores), 0)
        scores.logprobs[:] = self._scores
        return StepResult(self._token_ids, scores=scores)


class FakeRunner:
    """Executes plans in order, as a device does its stream.

    The cache holds for each slot what the model knows after the token: reading the slot of the token before is this
    device's attention. A wrong block, a stale row or a slot never written therefore changes the tokens or raises.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.block_size = block_size
        self.budget = max_num_batched_tokens
        self.cache: dict[int, int] = {}
        self.tables: dict[tuple[int, int], int] = {}
        self.last_token = [-1] * max_num_seqs
        self.seeds = [0] * max_num_seqs
        self.unread: deque[FakeHandle] = deque()
        self.num_rows_computed = self.num_tokens_computed = self.num_scored = 0

    def carry(self, plan: StepPlan) -> StepPlan:
        """Return the plan as the device gets it. Tests of what crosses to other ranks replace this."""
        return plan

    def launch(self, plan: StepPlan, *edits: None) -> FakeHandle:
        plan = self.carry(plan)
        self._check(plan)
        self.num_rows_computed += plan.num_seqs
        self.num_tokens_computed += plan.num_tokens
        for row, index, block in plan.block_entries.tolist():
            self.tables[row, index] = block
        for new in plan.new_rows:
            self.seeds[new["row"]] = int(new["seed_low"]) | int(new["seed_high"]) << 32
        states = self._compute(plan)
        sampled = []
        scores = []
        targets = iter(plan.targets.tolist())
        for i, row in enumerate(plan.rows.tolist()):
            drawn = [next_token(state, self.seeds[row]) for state in states[i][-1 - plan.num_drafts[i] :]]
            # The real runner also samples after a chunk of a prompt. Nobody may read that token, nor those of drafts.
            self.last_token[row] = drawn[0] if len(drawn) == 1 else -7
            scored = states[i][: len(states[i]) - plan.num_sampled[i]]
            scores += [score(state, next(targets)) for state in scored[len(scored) - plan.num_scored[i] :]]
            if plan.num_sampled[i]:
                sampled += drawn
        assert next(targets, None) is None
        self.num_scored += len(scores)
        handle = FakeHandle(self, np.array(sampled, np.int32), scores)
        self.unread.append(handle)
        return handle

    def reason_to_close(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _check(self, plan: StepPlan) -> None:
        assert plan.num_seqs > 0 and plan.num_tokens <= self.budget
        assert len(set(plan.rows.tolist())) == plan.num_seqs
        assert (plan.num_scheduled >= 1).all() and plan.num_scheduled.sum() == plan.num_tokens
        decodes = plan.num_scheduled == 1
        assert decodes[: plan.num_decodes].all() and not decodes[plan.num_decodes :].any()
        assert (plan.num_sampled + plan.num_scored <= plan.num_scheduled).all()

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row, position // self.block_size] * self.block_size + position % self.block_size

    def _compute(self, plan: StepPlan) -> list[list[int]]:
        """Return for each sequence the state after each of its tokens of the step.

        In each layer a model stores all tokens before any of them attends. So a sequence may build on a block that
        another one computes in the same step. Here a sequence waits until the state before its first token is there.
        """
        ends = plan.num_scheduled.cumsum().tolist()
        states: list[list[int]] = [[] for _ in range(plan.num_seqs)]
        pending = list(range(plan.num_seqs))
        written: set[int] = set()
        slots = {}
        for i in pending:
            row = int(plan.rows[i])
            start = int(plan.num_computed[i])
            n = int(plan.num_scheduled[i])
            slots[i] = [self._slot(row, p) for p in range(start, start + n)]
            for slot in slots[i]:
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.cache.pop(slot, None)
        while pending:
            blocked = []
            for i in pending:
                row = int(plan.rows[i])
                start = int(plan.num_computed[i])
                n = int(plan.num_scheduled[i])
                before = self._slot(row, start - 1) if start else None
                if before is not None and before not in self.cache:
                    assert before in written, f"row {row} reads a slot that was never written"
                    blocked.append(i)
                    continue
                state = self.cache[before] if before is not None else 0
                for token, slot in zip(plan.token_ids[ends[i] - n : ends[i]].tolist(), slots[i], strict=True):
                    state = state_after(state, token if token >= 0 else self.last_token[row])
                    self.cache[slot] = state
                    states[i].append(state)
            assert len(blocked) < len(pending), "sequences wait for each other"
            pending = blocked
        return states


class PairMatcher:
    """Stands for a stop string that straddles tokens: ends at the second of two given tokens in a row."""

    def __init__(self, first: int, second: int) -> None:
        self.pair = (first, second)
        self.before = -1
        self.text = ""
        self.found = None

    def feed(self, token_id: int) -> bool:
        found = (self.before, token_id) == self.pair
        self.before = token_id
        return found


def expected_tokens(
    prompt: list[int], params: SamplingParams, seed: int, eos: frozenset[int], max_model_len: int, pair=None
) -> tuple[list[int], str]:
    """Return what a request gives if it runs alone: (output tokens, finish reason)."""
    state = 0
    for token in prompt:
        state = state_after(state, token)
    output: list[int] = []
    stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else eos)
    while params.max_tokens > 0:
        token = next_token(state, seed)
        output.append(token)
        state = state_after(state, token)
        if token in stops or (pair and tuple(output[-2:]) == pair):
            return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, "length"
    return [], "length"


def expected_scores(prompt: list[int], params: SamplingParams) -> list[dict[int, float] | None]:
    """Return the prompt_logprobs of a request that runs alone; all None if it asks for none."""
    state = 0
    scores = []
    start = len(prompt) if params.prompt_logprobs is None else max(params.prompt_logprob_start, 1)
    for position, token in enumerate(prompt):
        scores.append({token: score(state, token)} if position >= start else None)
        state = state_after(state, token)
    return scores


def found_scores(seq: Sequence) -> list[dict[int, float] | None]:
    """Return the prompt_logprobs that a sequence got; all None if it asks for none."""
    return [None] * seq.num_prompt_tokens if seq.scores is None else list_prompt_logprobs(seq, seq.scores)


def make_scoring() -> Any:
    from nanovllm.features.scoring.scoring import Scoring

    return Scoring()


def make_editor(config: ResolvedConfig, eos: frozenset[int]) -> Any:
    from nanovllm.features.edits.editing import Editing

    return Editing(config, None, eos)


def make_trace(path: str, scheduler: Scheduler) -> Any:
    from nanovllm.features.trace import Trace

    return Trace(path, "cpu", scheduler)


def make_engine(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 32,
    depth: int = 1,
    caching: bool = True,
    eos: frozenset[int] = frozenset(),
    digest=prefix_digest,
    trace: str | None = None,
) -> LLMEngine:
    """Return a real engine, scheduler and block manager around a FakeRunner.

    A feature is imported when a request asks for it, as `load` does.
    """
    config = ResolvedConfig(
        model="fake",
        dtype="float32",
        device="cpu",
        tensor_parallel_size=1,
        distributed_backend="gloo",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=0.9,
        num_kvcache_blocks=num_blocks,
        kvcache_memory_bytes=None,
        block_size=block_size,
        enable_prefix_caching=caching,
        use_graphs=False,
        attention_backend="torch",
        load_format="dummy",
        depth=depth,
        vocab_size=VOCAB,
        speculative_config=None,
        trace=trace,
        seed=0,
    )
    manager = BlockManager(num_blocks, block_size, caching)
    manager._digest = digest
    scheduler = Scheduler(
        manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=VOCAB,
        make_scoring=make_scoring,
    )
    runner = FakeRunner(num_blocks, block_size, max_num_seqs, max_num_batched_tokens)
    observers = [] if trace is None else [make_trace(trace, scheduler)]
    return LLMEngine(
        config,
        runner,
        scheduler,
        ModelFacts(eos_token_ids=eos),
        make_editor=lambda: make_editor(config, eos),
        observers=observers,
    )


def run_all(engine: LLMEngine, requests: Iterable[Request]) -> dict[int, Sequence]:
    """Run requests; returns {number: sequence} in the order in which they ended."""
    order = Order(engine, requests)
    return {order.take_number(seq): seq for ended in engine.run(order) for seq in ended}
