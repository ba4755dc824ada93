"""Drafts from a smaller model, which computes all that the model does, over blocks of the same numbers.

So it shares rows, block tables and prefix hits, and nothing of it needs planning. In each step its first pass computes
the tokens of the step that are known, and what its cache lacks of the ones before: the last draft, if it was accepted.
Further passes decode, with the request's own seed, position by position: a model that agrees with the target draws
what the target will draw.

    known                 a b c
    first pass            computes c, or the chunk of a prompt; draws d
    passes 2, 3           compute d, e; draw e, f
    the model's step      computes c d e f; where all are right, f is what the draft model lacks
"""

import json
from array import array
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.engine.hooks import Handle, Runner
from nanovllm.engine.plan import ROW_SAMPLING, IntArray, StepPlan
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.models.config import load_model_config
from nanovllm.models.hub import find_config
from nanovllm.resolve import resolve
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import quote

Places = NDArray[np.intp]


def find_draft(asked: EngineConfig, config: ResolvedConfig, model_folder: Path | None) -> ResolvedConfig:
    """The configuration with all that a runner needs to load the draft model beside the model.

    Args:
        model_folder: the model's.

    Raises:
        ValueError: there is no such model, it cannot run as the model does, or its tokens have other ids.
    """
    name = str((config.speculative_config or {})["model"])
    try:
        folder, source, data = find_config(name, None, asked.load_format)
        hf_config = load_model_config(data, source)
        like_model: dict[str, Any] = {name: getattr(config, name) for name in ("dtype", "device", "attention_backend")}
        like_model |= {"max_model_len": config.max_model_len, "kvcache_block_size": config.block_size}
        wanted = replace(asked, model=name, revision=None, speculative_config=None, enforce_eager=True, **like_model)
        own = resolve(wanted, hf_config)
        if own.max_model_len < config.max_model_len:
            raise ValueError(
                f"it is made for {own.max_model_len} tokens, and max_model_len is {config.max_model_len}: set that to "
                f"at most {own.max_model_len}"
            )
        check_same_ids(Tokenizer.find(model_folder), Tokenizer.find(folder))
    except ValueError as error:
        raise ValueError(f"speculative_config: model {quote(name)} cannot draft for {config.model}: {error}") from error
    draft = {
        "config": asdict(own),
        "hf_config": json.loads(hf_config.to_json_string(use_diff=False)),
        "folder": None if folder is None or own.load_format == "dummy" else str(folder),
        "vocab_size": int(hf_config.vocab_size),
    }
    return replace(config, draft=draft)


def check_same_ids(tokenizer: Tokenizer | None, other: Tokenizer | None) -> None:
    """Raise a ValueError unless both have the same map from token to id, or there is none."""
    if tokenizer is None or other is None:
        if tokenizer is not other:
            raise ValueError("one of them has a tokenizer, and the other has none")
        return
    ids, other_ids = tokenizer.vocabulary, other.vocabulary
    differing = sorted(token for token in ids.keys() | other_ids.keys() if ids.get(token) != other_ids.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"their tokenizers differ in {len(differing)} tokens: {quote(token)} has the id {other_ids.get(token)} in "
            f"the draft model and {ids.get(token)} in the model"
        )


class ModelDrafter:
    """Runs a draft model ahead of each step: a `Drafter`."""

    def __init__(self, runner: Runner, max_num_seqs: int, vocab_size: int, own_vocab_size: int) -> None:
        """
        Args:
            runner: of both models.
            vocab_size, own_vocab_size: the model's, and the draft model's: what pads the larger one is never drafted.
        """
        self._runner = runner
        self._vocab_size, self._own_vocab_size = vocab_size, own_vocab_size
        self._num_computed = np.zeros(max_num_seqs, np.int32)
        """Of each row: tokens with keys and values in the draft model's cache, rejected drafts among them."""

    def offer(self, seqs: Seq[Sequence], most: IntArray) -> IntArray:
        return most

    def ended(self, seq: Sequence) -> None:
        pass

    def draft(self, step: ScheduledStep) -> None:
        plan = step.plan
        num_drafts = plan.num_drafts
        most, after = int(num_drafts.max()), plan.num_scheduled.cumsum()
        ends = plan.num_computed + plan.num_scheduled - num_drafts
        drawn = np.zeros((plan.num_seqs, max(most, 1)), np.int32)
        passes = [self._launch_first(step, ends, num_drafts)]
        for i in range(1, most):
            who = np.flatnonzero(num_drafts > i)
            decodes = self._decodes(plan.rows[who], ends[who] + np.int32(i - 1))
            passes.append((who, self._runner.launch(decodes)))
        for i, (who, handle) in enumerate(passes):
            drawn[who, i] = handle.result().token_ids
        drawn[(drawn < 0) | (drawn >= self._vocab_size)] = 0
        self._num_computed[plan.rows] = ends + np.maximum(num_drafts - 1, 0)
        is_draft = np.arange(drawn.shape[1]) < num_drafts[:, None]
        plan.token_ids[((after - num_drafts)[:, None] + np.arange(drawn.shape[1]))[is_draft]] = drawn[is_draft]

    def _launch_first(self, step: ScheduledStep, ends: IntArray, num_drafts: IntArray) -> tuple[Places, Handle]:
        """The pass that computes each sequence's known tokens up to `ends`; and which it samples, in its order."""
        plan, known = step.plan, dict(zip(step.rows.tolist(), step.seqs, strict=True))
        if len(new_rows := plan.new_rows):
            self._num_computed[new_rows["row"]] = np.iinfo(np.int32).max
            new_rows = new_rows.copy()
            new_rows["num_logprobs"] = -1  # nobody asks for a draft's
        starts = np.minimum(self._num_computed[plan.rows], plan.num_computed)
        order = np.argsort(ends - starts > 1, kind="stable")  # decodes first
        after, tokens = plan.num_scheduled.cumsum(), array("i")
        spans = np.stack((plan.rows, starts, ends, after - plan.num_scheduled, after), 1)[order]
        for row, start, end, of_plan, to in spans.tolist():
            if (seq := known.get(row)) is not None:  # the plan may have left out sampled tokens
                tokens += seq.token_ids[start:end]
            else:
                tokens.frombytes(plan.token_ids[of_plan:to].tobytes())
        token_ids = np.frombuffer(tokens, np.int32)
        token_ids[token_ids >= self._own_vocab_size] = 0
        sampled = (num_drafts[order] > 0).astype(np.int32)
        first = StepPlan(
            rows=plan.rows[order],
            num_computed=starts[order],
            num_scheduled=(ends - starts)[order],
            num_sampled=sampled,
            num_scored=np.zeros_like(sampled),
            token_ids=token_ids,
            targets=np.empty(0, np.int32),
            block_entries=plan.block_entries,
            new_rows=new_rows,
            for_draft_model=True,
        )
        return order[sampled > 0], self._runner.launch(first)

    def _decodes(self, rows: IntArray, num_computed: IntArray) -> StepPlan:
        """A pass that computes the draft drawn last for each of rows, and draws the next."""
        ones = np.ones_like(rows)
        zeros = np.zeros_like(rows)
        nothing = np.empty(0, np.int32)
        entries, new_rows = nothing.reshape(0, 3), np.empty(0, ROW_SAMPLING)
        return StepPlan(rows, num_computed, ones, ones, zeros, -ones, nothing, entries, new_rows, for_draft_model=True)
