"""Names of vLLM's that only the stand-in meets (modules, classes, methods, arguments), and what to do instead."""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

from nanovllm.sampling_params import refuse_sampling
from nanovllm.utils.checks import refuse_unknown
from nanovllm.utils.foreign_names import leave_out
from nanovllm.utils.vllm_names import ADVICE as ADVICE_OF_OPTIONS
from nanovllm.utils.vllm_names import ANY, Row

_TEXT_ALONE = ADVICE_OF_OPTIONS["mm_processor_kwargs"]
_TRACE = ADVICE_OF_OPTIONS["profiler_config"]
_EDITS = ADVICE_OF_OPTIONS["logits_processors"]
_ONE_CACHE = ADVICE_OF_OPTIONS["kv_transfer_config"]
_EMBED = "embed(prompts, dimensions=..., normalize=...) has these as arguments"
_ONE_ENGINE = "one engine has one process, which answers many threads and asyncio tasks through LLM.submit"

INNER = f"these are vLLM's inner classes; LLM.stats() has counts, LLM.observe sees each step; {_ONE_ENGINE}"
"""The advice for modules of `vllm.v1` that no row has."""

LISTED = "docs/porting.md lists the names of vLLM's that are taken"
"""The advice for classes of vLLM's that no row has."""

MODULES = (
    "config.compilation distributed.parallel_state distributed.weight_transfer.nccl_common "
    "distributed.weight_transfer.nccl_engine distributed.weight_transfer.packed_tensor engine.arg_utils "
    "engine.async_llm_engine engine.llm_engine entrypoints.chat_utils entrypoints.llm envs inputs.data logger logprobs "
    "lora.request model_executor.utils outputs platforms pooling_params renderers.hf sampling_params sequence "
    "tokenizers transformers_utils.tokenizer utils.argparse_utils utils.counter utils.network_utils utils.print_utils "
    "utils.torch_utils version v1.engine.async_llm v1.metrics.reader worker.worker"
)
"""The modules of vLLM's that its clients import, with a space between them. Their packages are answered, too."""

POOLING = (
    Row("task", ("embed",)),
    Row("skip_reading_prefix_cache output_kind", (ANY,)),
    Row("step_tag_id returned_token_ids extra_kwargs late_chunking_params", (None,)),
)

ARGUMENTS = (
    Row("priority chat_template_content_format mode", (ANY,)),
    Row("tokenization_kwargs", (None, {}), "tokenise with get_tokenizer(), and pass token ids"),
    Row("mm_processor_kwargs", (None, {})),
    Row("lora_request", (None,), "generate and chat take lora_request"),
    Row("pooling_params", (None,), _EMBED),
    Row("truncate_prompt_tokens", (None,)),
    Row("start_engine_loop usage_context enable_log_requests", (ANY,)),
    Row("stat_loggers", (None,), "llm.stats() and the metrics of each output have the numbers"),
)

MISSING: Mapping[str, str] = {
    # methods and attributes of vLLM's LLM and EngineArgs
    "beam_search BeamSearchParams": "generate(prompts, SamplingParams(n=8, logprobs=0)) samples completions",
    "ScoringRequestOutput": "rerank(query, documents) has relevances; score(a, b) tells how likely b is after a",
    "start_profile stop_profile": _TRACE,
    "collective_rpc": "the ranks take no calls: make the change in this process, or in the model's folder",
    "apply_model": "llm.engine.runner.model is the model of one device; several ranks take no calls",
    "preprocess_chat": "render_chat(messages) returns the prompt and its token ids",
    "enqueue enqueue_chat wait_for_completion": "submit(prompt) returns a future at once",
    # modules, and names in them
    "assets multimodal image audio video EmbedsPrompt": _TEXT_ALONE,
    "PoolerConfig": _EMBED,
    "late_chunking LateChunkingParams late_chunking_params": "embed each chunk as a prompt",
    "KVTransferConfig kv_transfer kv_events": _ONE_CACHE,
    "apply_hf_chat_template parse_chat_messages load_chat_template": "chat and render_chat take chat_template, as text",
    "openai api_server": "nothing listens to HTTP; nanovllm run-batch answers the lines of a file",
    "ModelRegistry models": "FAMILIES in nanovllm.models.model_config is the table of models",
    "VllmConfig": f"EngineConfig has the options; for logits processors: {_EDITS}",
    "sample": f"in place of logits processors, {_EDITS}",
    "WeightTransferConfig weight_transfer": "LLM.load_weights(named_tensors) takes new weights",
}
"""{attributes, methods, modules or names in them, with a space between them: what to do instead of using them}."""

ACCEPTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    owner: {name: row.accepted for row in rows for name in row.names.split()}
    for owner, rows in {"methods": ARGUMENTS, "PoolingParams": POOLING}.items()
}
"""{methods or PoolingParams: {name: the values that change nothing}}."""

ADVICE: Mapping[str, str] = {
    **ADVICE_OF_OPTIONS,
    **{name: row.advice for row in (*ARGUMENTS, *POOLING) if row.advice for name in row.names.split()},
    **{name: advice for names, advice in MISSING.items() for name in names.split()},
}
"""{name: what to do instead}."""


def advise(name: str) -> str | None:
    """Return the advice for a module of vLLM's, or a name in it; None for one that vLLM does not seem to have."""
    last = name.rpartition(".")[2]
    rest = INNER if ".v1." in name else LISTED if last[0].isupper() else None
    return ADVICE.get(last, rest)


def explain_missing(what: str, name: str) -> AttributeError:
    """Return the error for an attribute that `what` lacks, with advice if it is vLLM's or nano-vLLM's."""
    advice = ADVICE.get(name)
    return AttributeError(f"{what} has no attribute {name!r}" + (f": {advice}" if advice else ""), name=name)


def check_arguments(method: Callable[..., Any], others: Mapping[str, Any]) -> None:
    """Raise an error for arguments that only vLLM's method has, unless they change nothing."""
    name = method.__name__
    rest = leave_out(others, name, ACCEPTED["methods"], ADVICE)
    refuse_sampling(rest, name)
    known = [*signature(method).parameters][1:]  # without `self`
    refuse_unknown(rest, [*known, *ACCEPTED["methods"]], name)


def with_others(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that takes, beside its own, the arguments of vLLM's that change nothing."""
    own = signature(method).parameters.keys()

    @wraps(method)
    def checked(*args: Any, **given: Any) -> Any:
        check_arguments(method, {name: value for name, value in given.items() if name not in own})
        return method(*args, **{name: value for name, value in given.items() if name in own})

    return checked
