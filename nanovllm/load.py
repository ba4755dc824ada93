"""Puts an engine together from its parts. With llm.py it is the only file that imports features, each in a function.

Nothing of a feature is imported before an option or a request asks for it.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.interfaces import Scorer, StepObserver
from nanovllm.engine.llm_engine import LLMEngine, ModelFacts
from nanovllm.engine.pooling import LAST_TOKEN_POOLING, Pooling
from nanovllm.engine.scheduler import Scheduler
from nanovllm.models.decoder import find_decoder
from nanovllm.models.generation_keys import check_generation_keys
from nanovllm.models.headers import fit_to_checkpoint
from nanovllm.models.hub import find_folder, find_model, find_tokenizer, is_gguf
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.model_config import OF_SCORES, find_family, find_refusal, has_scores, load_model_config
from nanovllm.models.model_folder import ModelFolder, read_tokenizer
from nanovllm.models.sizes import Sizes
from nanovllm.models.text_parts import STAND_INS
from nanovllm.models.weight_reader import load_weights, read_ahead
from nanovllm.runner.kv_memory import fit_length, make_cache
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.resolve import resolve
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import as_integer
from nanovllm.utils.forks import check_fork
from nanovllm.utils.machine import limit_threads
from nanovllm.utils.memory import check_memory_limits

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanovllm.features.distributed.leader import LeadingRunner
    from nanovllm.features.edits.editing import Editing
    from nanovllm.features.parsing.parser import AnswerParser
    from nanovllm.features.quantized.loading import ModelQuantizer

logger = logging.getLogger(__name__)


def load_engine(asked: EngineConfig) -> LLMEngine:
    """Load the model, make the KV cache, and return the engine.

    Raises:
        ValueError: the model cannot be loaded, or an option cannot be had here; the message says why.
    """
    try:
        return make_engine(asked)
    except Exception as error:
        from nanovllm.features.diagnosis import explain

        if explained := explain(error, asked.model):
            raise explained from error
        raise


def make_engine(asked: EngineConfig) -> LLMEngine:
    """Load a model and what belongs to it: see `load_engine`, which adds advice to errors."""
    check_memory_limits()  # those of the operating system, of this process's memory
    folder, checkpoint, hf_config, facts = read_files(asked)
    if asked.data_parallel_size > 1:
        from nanovllm.features.distributed.replicas import load_replicas

        return load_replicas(asked, folder, facts, assemble)
    config = resolve_options(asked, hf_config)
    if config.device == "cpu":
        limit_threads()
    check_fork()
    if config.speculative_config is not None and config.speculative_config["method"] == "draft_model":
        from nanovllm.features.drafts.draft_model import find_draft

        config = find_draft(asked, config, folder, find_config)
    with ThreadPoolExecutor(1) as pool, ExitStack() as on_error:
        # The tokenizer is read in a thread beside the weights, whose reading needs little Python.
        tokenizer_to_be = pool.submit(read_tokenizer, asked.tokenizer, folder, config.max_model_len)
        runner, allocate_cache = load_runner(config, hf_config, checkpoint)
        on_error.callback(runner.close)
        tokenizer = tokenizer_to_be.result()
        num_blocks = allocate_cache()
        config = fit_length(config, num_blocks)  # without a given max_model_len, as many tokens as the cache can hold
        if tokenizer is not None:
            tokenizer.max_model_len = config.max_model_len
        engine = assemble(config, facts, tokenizer, runner, num_blocks)
        on_error.pop_all()  # there was none: the runner stays open
    logger.info("%s on %s, %s, %s attention", config.model, config.device, config.dtype, config.attention_backend)
    return engine


def read_files(
    asked: EngineConfig,
) -> "tuple[ModelFolder | None, ModelFolder | None, PretrainedConfig, ModelFacts]":
    """Find a model, and read what its files say, the weights aside.

    Returns:
        The model's folder, None for a shape (a published configuration without weights); the same folder as checkpoint,
        None for random weights; its configuration; and its facts, whose end-of-sequence tokens are those of
        generation_config.json, or else of config.json.

    Raises:
        ValueError: there is no such model, or one that cannot run.
    """
    folder, source, data = find_config(asked.model, asked.revision, asked.load_format)
    if asked.tokenizer is not None:
        find_tokenizer(asked.tokenizer)  # a wrong name is refused before weights are read
    checkpoint = None if asked.load_format == "dummy" else folder
    if checkpoint is not None:
        # Read while transformers is imported. Of a damaged checkpoint `fit_to_checkpoint` says later what is wrong: an
        # error of config.json comes first.
        with suppress(ValueError):
            read_ahead(checkpoint.files)
    hf_config = load_model_config(data, source, asked.model_impl)
    can_generate = fit_to_checkpoint(hf_config, checkpoint)
    pooling = find_pooling(folder, checkpoint, hf_config)
    if pooling.refusal and not can_generate:  # the model could only make vectors
        raise ValueError(pooling.refusal)
    default_params, refused_defaults = read_default_params(folder)
    generation = {} if folder is None else folder.generation
    ends = {**data, **generation}.get("eos_token_id")  # one id or a list
    ends = ends if isinstance(ends, list) else [ends]
    eos_token_ids = frozenset(as_integer(i, "the model's eos_token_id") for i in ends if i is not None)
    facts = ModelFacts(
        embedding_size=pooling.size or hf_config.hidden_size,
        has_lm_head=can_generate,
        eos_token_ids=eos_token_ids,
        default_params=default_params,
        refused_defaults=refused_defaults,
        pooling=pooling,
        origin=source if folder is None else folder.path.absolute(),
        stand_ins={data[name]: name for name in STAND_INS if isinstance(data.get(name), int)},
        stamps=() if checkpoint is None else checkpoint.stamps,
    )
    return folder, checkpoint, hf_config, facts


def find_config(model: str, revision: str | None, load_format: str) -> tuple[ModelFolder | None, str, dict[str, Any]]:
    """Return a model's folder, the source of its config.json, and the content of that.

    The folder is None for a shape alone, which gets random weights. A shape's name has no slash, as a hub's id has.

    Raises:
        ValueError: there is no such model.
    """
    if load_format == "gguf" or is_gguf(model):
        from nanovllm.features.gguf.files import find_gguf

        found = find_gguf(model, revision)
        return found, found.source, found.config
    if "/" not in model and (load_format == "dummy" or find_folder(model) is None):
        from nanovllm.features.shapes import find_shape

        if (shape := find_shape(model, load_format)) is not None:
            return None, f"preset {model.lower()}", shape
    folder = ModelFolder(find_model(model, revision))
    return folder, folder.source, folder.config


def resolve_options(
    asked: EngineConfig, hf_config: "PretrainedConfig", gpu_memory: int | None = None
) -> ResolvedConfig:
    """Turn every "auto" into a value: for one device, then for several ranks, and for the model's family.

    Args:
        gpu_memory: the bytes of a GPU that need not be here, for an estimate: see `resolve`.

    Raises:
        ValueError: an option asks for something that cannot run here; the message says why. If the model is of a family
            that has code here, and yet runs through transformers' code, the message says why it does.
    """
    try:
        return _resolve_options(asked, hf_config, gpu_memory)
    except ValueError as error:
        if refusal := find_refusal(hf_config):
            raise ValueError(f"{error}; this engine's own code does not run the model: {refusal}") from error
        raise


def _resolve_options(asked: EngineConfig, hf_config: "PretrainedConfig", gpu_memory: int | None) -> ResolvedConfig:
    if asked.speculative_config is not None:
        from nanovllm.features.drafts.options import read_speculative_config

        asked = replace(asked, speculative_config=read_speculative_config(asked.speculative_config))
    is_described = gpu_memory is not None
    sizes = Sizes(hf_config)
    config = resolve(asked, hf_config, sizes, gpu_memory)
    if config.num_ranks > 1:
        from nanovllm.features.distributed.options import resolve_ranks

        config = resolve_ranks(asked, config, is_described)
    quantizer = make_quantizer(config, hf_config)  # refuses a format that cannot be read
    if quantizer is not None:
        if is_described:
            with suppress(ImportError):  # this machine may lack the kernels of the described GPU
                quantizer.check()
        else:
            quantizer.check()
            quantizer.announce(sizes.model)
        config = replace(config, quantization=quantizer.format.name)
    family = find_family(hf_config)
    if family.resolve is None:
        return config
    resolved: ResolvedConfig = resolve_name(family.resolve)(asked, config, sizes, quantizer, gpu_memory)
    return resolved


def load_runner(
    config: ResolvedConfig, hf_config: "PretrainedConfig", checkpoint: ModelFolder | None
) -> tuple["ModelRunner | LeadingRunner", Callable[[], int]]:
    """Load the model on one device, or on several ranks.

    Args:
        checkpoint: its folder; None for random weights.

    Returns:
        The runner, and the function that allocates its KV cache and returns the number of blocks.
    """
    if config.num_ranks == 1:
        runner = make_runner(config, hf_config, checkpoint, Parallel())
        return runner, partial(make_cache, runner)
    from nanovllm.features.distributed.leader import LeadingRunner

    leader = LeadingRunner(config, hf_config, checkpoint, partial(make_runner, config, hf_config, checkpoint))
    return leader, leader.make_cache


def make_runner(
    config: ResolvedConfig,
    hf_config: "PretrainedConfig",
    checkpoint: ModelFolder | None,
    parallel: Parallel,
    runner_class: Callable[..., ModelRunner] = ModelRunner,
) -> ModelRunner:
    """Load one rank's share of the model, and the draft model beside it if there is one. Every rank calls this.

    Args:
        checkpoint: its folder; None for random weights.
        runner_class: makes the runner.
    """
    quantizer = make_quantizer(config, hf_config)
    if checkpoint is None:
        from nanovllm.features.dummy_weights import fill_randomly

        std = getattr(hf_config, "initializer_range", 0.02)
        fill = partial(fill_randomly, parallel=parallel, quantizer=quantizer, seed=config.seed, std=std)
    else:
        adapter = None
        if config.lora is not None:
            from nanovllm.features.adapters.lora import Adapter

            adapter = Adapter(config.lora)
        fill = partial(
            load_weights,
            parallel=parallel,
            quantizer=quantizer,
            config=hf_config,
            folder=checkpoint,
            unread=find_family(hf_config).unread + (OF_SCORES if has_scores(hf_config) else ()),
            adapter=adapter,
        )
    runner = runner_class(config, hf_config, fill, parallel, quantizer, find_decoder(hf_config))
    runner.model.prove(config)
    # All ranks that share layers share the draft model's, too. In a pipeline that shares none, rank 0 alone has it.
    if config.draft is not None and (parallel.rank == 0 or parallel.size > 1):
        from nanovllm.features.drafts.draft_model import read_draft

        runner.draft = make_runner(*read_draft(config), parallel)
    return runner


def make_quantizer(config: ResolvedConfig, hf_config: "PretrainedConfig") -> "ModelQuantizer | None":
    """Return what gives the model quantised matrices; None if neither its options nor its config.json ask for any."""
    if config.quantization is None and not getattr(hf_config, "quantization_config", None):
        return None
    from nanovllm.features.quantized.loading import ModelQuantizer

    return ModelQuantizer(config, hf_config)


def assemble(
    config: ResolvedConfig,
    facts: ModelFacts,
    tokenizer: Tokenizer | None,
    runner: "ModelRunner | LeadingRunner",
    num_blocks: int,
    engine_class: Callable[..., LLMEngine] = LLMEngine,
) -> LLMEngine:
    """Put an engine together around a runner whose KV cache has so many blocks."""
    tokenizer_ends = frozenset[int]() if tokenizer is None else tokenizer.eos_token_ids
    eos_token_ids = (facts.eos_token_ids | tokenizer_ends).intersection(range(config.vocab_size))
    parser = load_parser(config, tokenizer)
    scheduler, observers = make_scheduler(config, runner, num_blocks, tokenizer)

    def make_editor() -> "Editing":
        from nanovllm.features.edits.editing import Editing

        return Editing(config, tokenizer, eos_token_ids, parser.thinking if parser is not None else None)

    return engine_class(
        config,
        runner,
        scheduler,
        replace(facts, eos_token_ids=eos_token_ids),
        make_editor=make_editor,
        tokenizer=tokenizer,
        observers=observers,
        parse=parser.parse if parser is not None else None,
    )


def make_scheduler(
    config: ResolvedConfig, runner: "ModelRunner | LeadingRunner", num_blocks: int, tokenizer: Tokenizer | None
) -> tuple[Scheduler, list[StepObserver]]:
    """Return the scheduler, with a speculation if drafts are asked for, and the trace as observer if there is one."""

    def make_scoring() -> Scorer:
        from nanovllm.features.scoring.scoring import Scoring

        return Scoring()

    scheduler = Scheduler(
        BlockManager(num_blocks, config.block_size, config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=config.vocab_size,
        make_scoring=make_scoring,
    )
    scheduler.choose_running = getattr(runner, "choose_running", None)  # several ranks' runner has it
    if config.speculative_config is not None:
        from nanovllm.features.drafts.speculation import start_speculation

        scheduler.speculation = start_speculation(config, runner, scheduler)
    if config.trace is None:
        return scheduler, []
    from nanovllm.features.trace import Trace

    take_spans = getattr(runner, "take_spans", tuple)  # this, too
    return scheduler, [Trace(config.trace, config.device, scheduler, tokenizer, take_spans)]


def load_parser(config: ResolvedConfig, tokenizer: Tokenizer | None) -> "AnswerParser | None":
    """Return the parser of outputs that the options ask for; None if they ask for none."""
    if config.reasoning_parser is None and config.tool_call_parser is None:
        return None
    from nanovllm.features.parsing.parser import AnswerParser

    return AnswerParser(tokenizer, config.reasoning_parser, config.tool_call_parser)


def find_pooling(folder: ModelFolder | None, checkpoint: ModelFolder | None, hf_config: "PretrainedConfig") -> Pooling:
    """Return how a folder makes vectors: as the files of sentence-transformers say, else of the last hidden state.

    If the model has a head that scores texts, the scores are the vector.
    """
    if has_scores(hf_config):
        from nanovllm.features.scoring.heads import read_head

        return read_head(checkpoint, hf_config)
    if folder is not None and folder.pooling is not None:
        return folder.pooling
    if folder is None or not any((folder.path / name).exists() for name in ("modules.json", "1_Pooling")):
        return LAST_TOKEN_POOLING
    from nanovllm.features.scoring.pooling_files import read_pooling

    return read_pooling(folder.path, hf_config.hidden_size)


def read_default_params(folder: ModelFolder | None) -> tuple[SamplingParams, str]:
    """Return the SamplingParams that generation_config.json asks for, and why requests cannot have these, "" if they
    can."""
    generation = {} if folder is None else folder.generation
    try:
        check_generation_keys(generation)
        return SamplingParams.from_generation_config(generation), ""
    except ValueError as error:
        advice = "give SamplingParams; without them a request would take this file's values"
        return SamplingParams(), f"{'' if folder is None else folder.generation_source}: {error}: {advice}"
