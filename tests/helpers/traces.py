"""Random traces of requests, drawn by hypothesis, and the loop that drives an engine through one."""

import itertools

from hypothesis import strategies as st

from helpers.fakes import VOCAB, PairMatcher, make_engine, three_bit_digest
from helpers.integrity import check_scheduler
from nanovllm.engine.block_manager import prefix_digest
from nanovllm.sampling_params import SamplingParams


@st.composite
def traces(draw):
    """A configuration and requests that arrive, share prefixes, are scored, and are aborted."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_model_len = draw(st.integers(2, 24))
    smallest_pool = -(-max_model_len // block_size)
    config = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_blocks": smallest_pool + draw(st.integers(0, 12)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.sampled_from([1, 2, 3, 5, 8, 64])),
        "caching": draw(st.booleans()),
        "digest": draw(st.sampled_from([prefix_digest, three_bit_digest])),
        "eos": draw(st.sampled_from([frozenset(), frozenset({0}), frozenset({1, 2, 3})])),
    }
    stem = draw(st.lists(st.integers(0, 2), min_size=max_model_len, max_size=max_model_len))
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        max_tokens = draw(st.integers(0, 12))
        is_scored = max_tokens == 0 or draw(st.booleans())
        length = draw(st.integers(1, max_model_len + (1 if max_tokens == 0 else -1)))
        own = draw(st.integers(0, length))
        prompt = (stem * 2)[: length - own] + draw(st.lists(st.integers(0, VOCAB - 1), min_size=own, max_size=own))
        params = SamplingParams(
            max_tokens=max_tokens,
            prompt_logprobs=0 if is_scored else None,
            prompt_logprob_start=draw(st.integers(0, length - 1)) if is_scored else 0,
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([None, [5], [6, 7]])),
            seed=draw(st.integers(0, 3)),
        )
        pair = draw(st.sampled_from([None, None, (8, 9), (10, 10)]))
        arrives = draw(st.integers(0, 10))
        aborted = draw(st.sampled_from([None, None, None, 0, 3, 6]))
        requests.append((prompt, params, pair, arrives, aborted))
    return config, requests


def run_trace(config, requests, depth, prepare_engine=lambda engine: None):
    """Drive the engine turn by turn, checking it after every one; returns each request's sequence, and the engine."""
    engine = make_engine(**config, depth=depth)
    prepare_engine(engine)
    seqs = {}
    for turn in itertools.count():
        for i, (prompt, params, pair, arrives, aborted) in enumerate(requests):
            if turn == arrives:
                seqs[i] = engine.add(engine.prepare(prompt, params))
                seqs[i].stop_matcher = PairMatcher(*pair) if pair else None
            if aborted is not None and turn == arrives + aborted + 1:
                engine.scheduler.end(seqs[i], "abort")
        finished = engine.step() if engine.has_work else []
        check_scheduler(engine.scheduler)
        assert len(engine.scheduler.running) <= config["max_num_seqs"]
        assert all(seq.finish_reason in ("stop", "length") for seq in finished)
        assert turn < 2000, "the trace does not end"
        if len(seqs) == len(requests) and not engine.has_work:
            return seqs, engine
