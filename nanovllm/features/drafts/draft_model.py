"""Drafts from a smaller model, which runs a few passes before each step of the model.

It computes every token that the model computes, and has a cache with blocks of the same numbers. So it shares rows,
block tables and prefix hits with the model, and the scheduler plans nothing for it. Its first pass computes the known
tokens of the step, and earlier ones that its cache lacks: the last draft of the step before, if it was accepted. Each
further pass computes the draft that was drawn last, and draws the next one with the request's own seed and position: if
both models agree on the logits, they draw the same tokens.

    known                 a b c
    first pass            computes c, or the chunk of a prompt; draws d
    passes 2, 3           compute d, e; draw e, f
    the model's step      computes c d e f; if all are right, the draft model's cache lacks f
"""

import json
import logging
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.engine.interfaces import Handle
from nanovllm.engine.plan import (
    FAILED,
    LAST_TOKEN,
    NO_ENTRIES,
    NO_LOGPROBS,
    NO_NEW_ROWS,
    NO_TARGETS,
    IntArray,
    StepPlan,
)
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.features.drafts.costs import PlanRunner
from nanovllm.models.headers import fit_to_checkpoint
from nanovllm.models.hub import is_gguf
from nanovllm.models.model_config import limit_length, load_model_config
from nanovllm.models.model_folder import ModelFolder, read_tokenizer
from nanovllm.models.sizes import Sizes
from nanovllm.runner.resolve import resolve
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

ALIKE = ("dtype", "kv_cache_dtype", "device", "attention_backend", "max_num_seqs", "max_model_len")
"""The options that a draft model shares with the model, once they are resolved."""

Indices = NDArray[np.intp]
FindConfig = Callable[[str, str | None, str], tuple[ModelFolder | None, str, dict[str, Any]]]


def find_draft(
    asked: EngineConfig, config: ResolvedConfig, model_folder: ModelFolder | None, find_config: FindConfig
) -> ResolvedConfig:
    """Return the model's configuration with `draft` filled in: all that a rank needs to load the draft model.

    Args:
        asked: the user's options.
        config: the model's resolved options.
        model_folder: the model's folder; None if it has random weights.
        find_config: `load.find_config`.

    Raises:
        ValueError: there is no such model, it cannot run as the model does, or its tokens have other ids.
    """
    name = str((config.speculative_config or {})["model"])
    try:
        folder, source, data = find_config(name, None, asked.load_format)
        hf_config = load_model_config(data, source, asked.model_impl)
        if not fit_to_checkpoint(hf_config, None if asked.load_format == "dummy" else folder):
            raise ValueError("it has no LM head, and can only embed")
        sizes = Sizes(hf_config)
        if sizes.row_bytes(torch.float32):
            raise ValueError("it keeps a state for each sequence, which cannot take back the tokens of a wrong draft")
        has_own_format = bool(getattr(hf_config, "quantization_config", None))
        wanted = replace(
            asked,
            model=name,
            revision=None,
            tokenizer=None,
            lora=None,
            speculative_config=None,
            quantization=None if has_own_format else find_rounding(asked.quantization),
            pipeline_parallel_size=1,  # rank 0 of a pipeline has the whole draft model
            kvcache_block_size=config.block_size,
            **{name: getattr(config, name) for name in ALIKE},
        )
        if not config.has_given_length:
            config = fit_length_to_draft(config, limit_length(hf_config, None), name)
            wanted = replace(wanted, max_model_len=config.max_model_len)
        own = replace(
            resolve(wanted, hf_config, sizes),
            use_graphs=False,  # their memory is not measured
            has_given_length=config.has_given_length,
        )
        if own.max_model_len < config.max_model_len:
            raise ValueError(
                f"it is made for {own.max_model_len} tokens, and max_model_len is {config.max_model_len}: set that to "
                f"at most {own.max_model_len}"
            )
        check_same_ids(read_tokenizer(asked.tokenizer, model_folder), read_tokenizer(None, folder))
    except ValueError as error:
        raise ValueError(f"speculative_config: model {quote(name)} cannot draft for {config.model}: {error}") from error
    draft = {
        "config": asdict(own),
        "hf_config": json.loads(hf_config.to_json_string(use_diff=False)),
        "folder": None if folder is None or own.load_format == "dummy" else str(folder),
    }
    return replace(config, draft=draft)


def fit_length_to_draft(config: ResolvedConfig, most: int, name: str) -> ResolvedConfig:
    """Return the model's configuration, with a max_model_len that its draft model can have, too.

    Args:
        most: the most tokens that the draft model is made for.
        name: the draft model's.
    """
    if most >= config.max_model_len:
        return config
    logger.warning(
        "max_model_len is %d, not the model's %d: the draft model %s is made for no more",
        *(most, config.max_model_len, quote(name)),
    )
    return replace(config, max_model_len=most)


def find_rounding(quantization: str | None) -> str | None:
    """Return the option `quantization` of a draft model that is not quantised: the model's, if it is made at load."""
    if quantization is None:
        return None
    from nanovllm.features.quantized.formats import MADE_AT_LOAD

    return quantization if quantization in MADE_AT_LOAD else None


def read_draft(config: ResolvedConfig) -> tuple[ResolvedConfig, "PretrainedConfig", ModelFolder | None]:
    """Return what a rank loads the draft model from: its options, its transformers configuration, its folder."""
    draft = config.draft or {}
    own = ResolvedConfig(**draft["config"] | {"device": config.device})
    folder = None if draft["folder"] is None else ModelFolder(Path(draft["folder"]))
    if folder is not None and is_gguf(draft["folder"]):
        from nanovllm.features.gguf.model import GgufModel

        folder = GgufModel(folder.path)
    return own, load_model_config(draft["hf_config"], own.model, own.model_impl), folder


def check_same_ids(tokenizer: Tokenizer | None, other: Tokenizer | None) -> None:
    """Raise a ValueError unless both tokenizers give each token the same id, or both are None.

    Args:
        tokenizer: the model's tokenizer.
        other: the draft model's tokenizer.
    """
    if tokenizer is None or other is None:
        if tokenizer is not other:
            raise ValueError("one of them has a tokenizer, and the other has none")
        return
    ids = tokenizer.vocabulary
    other_ids = other.vocabulary
    differing = sorted(token for token in ids.keys() | other_ids.keys() if ids.get(token) != other_ids.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"their tokenizers differ in {len(differing)} tokens: {quote(token)} has the id {other_ids.get(token)} in "
            f"the draft model and {ids.get(token)} in the model"
        )


class ModelDrafter:
    """A `Drafter` that runs a draft model."""

    def __init__(self, runner: PlanRunner, max_num_seqs: int, vocab_size: int, draft_vocab_size: int) -> None:
        """
        Args:
            runner: the draft model's runner. The draft model has a KV cache of its own; the same block numbers serve
                both models.
            vocab_size: the size of the model's vocabulary. Draws beyond it are never drafts.
            draft_vocab_size: the size of the draft model's vocabulary. It gets token 0 for tokens beyond it.
        """
        self._runner = runner
        self._vocab_size = vocab_size
        self._draft_vocab_size = draft_vocab_size
        self._num_computed = np.zeros(max_num_seqs, np.int32)
        """By row: tokens whose keys and values are in the draft model's cache, rejected drafts included."""

    def offer(self, seqs: Seq[Sequence], limits: IntArray) -> IntArray:
        return limits

    def note_end(self, seq: Sequence) -> None:
        pass

    def write_drafts(self, step: ScheduledStep) -> None:
        plan = step.plan
        num_drafts = plan.num_drafts
        num_passes = int(num_drafts.max())
        ends = plan.num_computed + plan.num_scheduled - num_drafts  # of the known tokens
        drawn = np.zeros((plan.num_seqs, max(num_passes, 1)), np.int32)
        passes = [self._launch_first_pass(step, ends, num_drafts)]
        for i in range(1, num_passes):
            seqs = np.flatnonzero(num_drafts > i)
            decodes = self._plan_decodes(plan.rows[seqs], ends[seqs] + np.int32(i - 1))
            passes.append((seqs, self._runner.launch(decodes)))
        for i, (seqs, handle) in enumerate(passes):
            drawn[seqs, i] = handle.result().token_ids
        drawn[(drawn == FAILED) | (drawn >= self._vocab_size)] = 0
        self._num_computed[plan.rows] = ends + np.maximum(num_drafts - 1, 0)
        columns = np.arange(drawn.shape[1])
        is_draft = columns < num_drafts[:, None]
        first_drafts = plan.num_scheduled.cumsum() - num_drafts  # their indices in token_ids
        plan.token_ids[(first_drafts[:, None] + columns)[is_draft]] = drawn[is_draft]

    def _launch_first_pass(self, step: ScheduledStep, ends: IntArray, num_drafts: IntArray) -> tuple[Indices, Handle]:
        """Launch the pass that computes the known tokens of each sequence up to `ends`, and draws the first drafts.

        Returns the indices of the sequences that it draws for, in the order of its results.
        """
        plan = step.plan
        seq_by_row = dict(zip(step.rows.tolist(), step.seqs, strict=True))
        new_rows = plan.new_rows
        if len(new_rows):
            # Prefix hits, found for the model, are in this cache, too: so minimum() below takes the model's count.
            self._num_computed[new_rows["row"]] = np.iinfo(np.int32).max
            new_rows = new_rows.copy()
            new_rows["num_logprobs"] = NO_LOGPROBS
            new_rows["is_edited"] = False
        starts = np.minimum(self._num_computed[plan.rows], plan.num_computed)
        order = np.argsort(ends - starts > 1, kind="stable")  # decodes first
        plan_ends = plan.num_scheduled.cumsum()
        plan_starts = plan_ends - plan.num_scheduled
        tokens = array("i")
        spans = np.stack((plan.rows, starts, ends, plan_starts, plan_ends), 1)[order]
        for row, start, end, plan_start, plan_end in spans.tolist():
            if (seq := seq_by_row.get(row)) is not None:  # the plan may have LAST_TOKEN for it
                tokens += seq.token_ids[start:end]
            else:
                tokens.frombytes(plan.token_ids[plan_start:plan_end].tobytes())
        token_ids = np.frombuffer(tokens, np.int32)
        token_ids[token_ids >= self._draft_vocab_size] = 0
        num_sampled = (num_drafts[order] > 0).astype(np.int32)
        first = plan._replace(
            rows=plan.rows[order],
            num_computed=starts[order],
            num_scheduled=(ends - starts)[order],
            num_sampled=num_sampled,
            num_scored=np.zeros_like(num_sampled),
            token_ids=token_ids,
            targets=NO_TARGETS,
            new_rows=new_rows,
        )
        return order[num_sampled > 0], self._runner.launch(first)

    def _plan_decodes(self, rows: IntArray, num_computed: IntArray) -> StepPlan:
        """Return the plan of a pass that computes the draft drawn last for each of some rows, and draws the next."""
        ones = np.ones_like(rows)
        return StepPlan(
            rows=rows,
            num_computed=num_computed,
            num_scheduled=ones,
            num_sampled=ones,
            num_scored=np.zeros_like(rows),
            token_ids=np.full_like(rows, LAST_TOKEN),
            targets=NO_TARGETS,
            block_entries=NO_ENTRIES,
            new_rows=NO_NEW_ROWS,
        )
