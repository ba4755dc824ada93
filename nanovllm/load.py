"""Puts an engine together: the one room that knows all the wings."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.distributed.leader import LeadingRunner
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.hooks import LogitEditor, StepObserver
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.layers.parallel import Parallel
from nanovllm.models.config import load_model_config, read_json
from nanovllm.models.hub import find_config
from nanovllm.resolve import resolve
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.ahead import read_ahead
from nanovllm.utils.checks import as_integer
from nanovllm.utils.machine import limit_threads

logger = logging.getLogger(__name__)


def load_engine(asked: EngineConfig) -> LLMEngine:
    """Load the model and make the KV cache; ValueError for whatever is asked that cannot be had."""
    folder, source, data = find_config(asked.model, asked.revision, asked.load_format)
    weights = None if asked.load_format == "dummy" else folder
    read_ahead(sorted(weights.glob("*.safetensors")) if weights is not None else [])  # while transformers is imported
    hf_config = load_model_config(data, source)
    config = resolve(asked, hf_config)
    if config.device == "cpu":
        limit_threads()
    vocab_size = int(hf_config.vocab_size)
    if config.speculative_config is not None and config.speculative_config["method"] == "draft_model":
        from nanovllm.drafts.draft_model import find_draft

        config = find_draft(asked, config, folder)
    path = folder / "generation_config.json" if folder is not None else None
    generation = read_json(path) if path is not None and path.is_file() else {}
    named_eos = generation.get("eos_token_id", data.get("eos_token_id"))
    try:
        default_params = SamplingParams.from_generation_config(generation)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    with ThreadPoolExecutor(1) as aside, ExitStack() as on_error:
        tokenizer_to_be = aside.submit(Tokenizer.find, folder)  # reading weights leaves the interpreter to it
        given, alone = (config, hf_config, weights), config.tensor_parallel_size == 1
        runner: ModelRunner | LeadingRunner = ModelRunner(*given, Parallel()) if alone else LeadingRunner(*given)
        on_error.callback(runner.close)
        tokenizer = tokenizer_to_be.result()
        make_blocks: Callable[[int, int, bool], BlockManager] = BlockManager
        trace = None
        if config.trace is not None:
            from nanovllm.view.trace import Trace

            trace = Trace(config.trace, config.device, tokenizer)
            make_blocks = trace.block_manager
        num_blocks = runner.make_cache()
        scheduler = Scheduler(
            make_blocks(num_blocks, config.block_size, config.enable_prefix_caching),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=vocab_size,
        )
        observers: list[StepObserver] = []
        if trace is not None:
            trace.watch(scheduler)
            observers.append(trace)
        if config.speculative_config is not None:
            from nanovllm.drafts.speculation import start_speculation

            scheduler.speculation = start_speculation(config, runner, scheduler, vocab_size)
        all_eos = eos_token_ids(named_eos, tokenizer, vocab_size)

        def make_editor() -> LogitEditor:
            from nanovllm.edits.editing import Editing

            return Editing(tokenizer, vocab_size, all_eos, config.max_model_len, config.max_num_seqs)

        logger.info("%s on %s, %s, %s attention", config.model, config.device, config.dtype, config.attention_backend)
        engine = LLMEngine(
            config,
            runner,
            scheduler,
            vocab_size=vocab_size,
            make_editor=make_editor,
            tokenizer=tokenizer,
            eos_token_ids=all_eos,
            default_params=default_params,
            observers=observers,
            origin=folder or source,
        )
        on_error.pop_all()
        return engine


def eos_token_ids(named: Any, tokenizer: Tokenizer | None, vocab_size: int) -> frozenset[int]:
    """The tokenizer's, and the one or those that the model's files name."""
    ids = [*(named if isinstance(named, list) else [named]), tokenizer and tokenizer.eos_token_id]
    known = (as_integer(i, "the model's eos_token_id") for i in ids if i is not None)
    return frozenset(i for i in known if 0 <= i < vocab_size)


def read_provenance(engine: LLMEngine) -> dict[str, str]:
    """Return the facts beside requests and options that decide the tokens: see `LLM.provenance`."""
    from nanovllm.jobs.provenance import read_provenance

    return read_provenance(engine.config, engine.origin)
