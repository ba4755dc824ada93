"""Estimates from config.json alone whether a model fits into a GPU or a CPU's memory, and the least time of a job.

Quantised weights count in their own format.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.apps.floor import Cost, Machine, Model, ideal_steps, measure_machine, step_cost
from nanovllm.apps.jobs.forms import prepare_line
from nanovllm.apps.jobs.request_lines import LineError, add_defaults, read_request_line
from nanovllm.apps.jobs.source import Reading, Source
from nanovllm.backends.gpu.memory import GpuMemory
from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.engine.llm_engine import ModelFacts
from nanovllm.features.diagnosis import explain
from nanovllm.features.distributed.stage_decoder import make_stage_decoder
from nanovllm.features.distributed.stages import choose_stages
from nanovllm.features.gguf.files import find_gguf
from nanovllm.features.shapes import PRESETS, preset_config
from nanovllm.llm import LLM
from nanovllm.load import assemble, find_pooling, make_quantizer, read_default_params, resolve_options
from nanovllm.models.decoder import find_decoder
from nanovllm.models.hub import CONFIGS, QUANTIZATION_CONFIGS, TOKENIZER, as_path, download, find_folder, is_gguf
from nanovllm.models.model_config import load_model_config, read_json
from nanovllm.models.model_folder import ModelFolder, read_tokenizer
from nanovllm.models.sizes import Sizes
from nanovllm.runner.kv_memory import fit_length
from nanovllm.runner.resolve import resolve_device
from nanovllm.text.tokenizer import explain_no_tokenizer
from nanovllm.utils.checks import quote
from nanovllm.utils.memory import CPU_CACHE_LIMIT, free_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_UNITS = {"": 1, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes of "80GB", "80GiB", "80G" or a plain number. GB means 2**30 bytes, as makers of GPUs use it.

    A plain number below 1,024 is in GB, too: no GPU has so few bytes.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d*)?)\s*(?:([MGT])(?:i?B)?|B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if text.strip().replace(".", "").isdigit() and size < 1024:
        return parse_size(f"{text}G")
    if size == 0:
        raise ValueError(f"--memory is {quote(text)}; it must be a size such as 80GB")
    return size


def fetch_config(model: str, model_impl: str = "auto") -> "PretrainedConfig":
    """Return the configuration of a shape, a folder, a config.json or a Hugging Face id.

    Of an id only config.json is fetched, with the settings of quantisation that older tools keep beside it. Nothing is
    fetched if the id names a shape, as Qwen/Qwen3-8B does, nor of a model in GGUF, which must be in the cache.

    Args:
        model_impl: the option: whose code computes the model.

    Raises:
        ValueError: there is no such model, or one that is not supported.
    """
    try:
        path = as_path(model)
        shape = model.rpartition("/")[2].lower()
        if model.lower() in (shape, PRESETS.get(shape, "").lower()) and shape in PRESETS and not path.exists():
            return load_model_config(preset_config(shape), f"preset {shape}", model_impl)
        if path.is_file() and not is_gguf(model):
            return load_model_config(read_json(path), str(path), model_impl)
        folder = open_model(model, ["config.json", *QUANTIZATION_CONFIGS])
        return load_model_config(folder.config, folder.source, model_impl)
    except ValueError as error:
        raise explain(error, model) or error from error


def open_model(model: str, patterns: list[str]) -> ModelFolder:
    """Return the files of a model. Of a hub id those that match the patterns are downloaded, and no file in GGUF."""
    if is_gguf(model):
        return find_gguf(model, downloads=False)
    return ModelFolder(find_folder(model) or download(model, patterns))


class Gpu:
    """Tells an estimate how to count GPUs, of which each rank has one, and what to call them."""

    memory = "GPU memory"
    larger = "a larger GPU"

    def room_for_cache(self, memory: GpuMemory, config: ResolvedConfig) -> int:
        """Return the bytes of the KV cache, if the user gives no size; negative if the rest does not fit."""
        return memory.left_for_cache(config.gpu_memory_utilization)

    def describe_room(self, config: ResolvedConfig) -> str:
        """Return which part of the memory that is."""
        return f"gpu_memory_utilization={config.gpu_memory_utilization:g} is used"

    def describe_place(self, ranks: int) -> str:
        """Return on what a rank runs."""
        return "one GPU" if ranks == 1 else f"each of {ranks} GPUs"

    def list_changes(self, config: ResolvedConfig, needed: int) -> list[dict[str, object]]:
        """Return options that give the KV cache more memory; one sequence needs `needed` bytes."""
        changes: list[dict[str, object]] = [{"gpu_memory_utilization": 0.95}]
        return changes + [{"tensor_parallel_size": n} for n in (2, 4, 8) if n > config.tensor_parallel_size]


class Cpu(Gpu):
    """The same for the CPU, whose memory all ranks share: with each other, and with other programs."""

    memory = "memory"
    larger = "more memory"

    def room_for_cache(self, memory: GpuMemory, config: ResolvedConfig) -> int:
        return min(memory.left_for_cache(1.0) // 4, CPU_CACHE_LIMIT)

    def describe_room(self, config: ResolvedConfig) -> str:
        return "the KV cache gets a quarter of what the weights leave, 4 GiB at most"

    def describe_place(self, ranks: int) -> str:
        return "one CPU" if ranks == 1 else f"each of {ranks} ranks of one CPU"

    def list_changes(self, config: ResolvedConfig, needed: int) -> list[dict[str, object]]:
        return [{"kvcache_memory_bytes": needed}]


@dataclass(frozen=True)
class Estimate:
    """The memory that each rank's GPU would hold.

    Attributes:
        num_parameters: the parameters of the whole model.
        memory: the bytes on one GPU. The activations are estimated.
        format: how the weights are stored, such as "bfloat16" or "int8".
        code: whose code computes the model: see `describe_code`.
        advice: options that would make the model fit; empty if it fits.
    """

    config: ResolvedConfig
    num_parameters: int
    memory: GpuMemory
    kv_bytes_per_token: int
    format: str
    code: str
    advice: tuple[str, ...] = ()

    @property
    def device(self) -> Gpu:
        return Cpu() if self.config.device == "cpu" else Gpu()

    @property
    def kv_budget(self) -> int:
        """Bytes left for the KV cache; negative if the rest does not fit."""
        asked = self.config.kvcache_memory_bytes or self.device.room_for_cache(self.memory, self.config)
        return min(asked, self.memory.left_for_cache(1.0))

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds, in whole blocks. For a stage of a pipeline without keys and values the number
        is so large that the other stages decide."""
        size = self.config.block_size
        return max(self.kv_budget, 0) // (max(self.kv_bytes_per_token, 1) * size) * size

    @property
    def num_sequences(self) -> float:
        """How many sequences of max_model_len tokens the cache holds at a time."""
        return self.num_tokens / (self.config.max_blocks_per_seq * self.config.block_size)

    @property
    def fits(self) -> bool:
        return self.num_sequences >= 1 or (self.num_tokens > 0 and not self.config.has_given_length)

    def describe(self) -> str:
        """Return a table, and a sentence that says whether the model fits."""
        config = self.config
        memory = self.memory
        room = self.device.describe_room(config)
        if config.kvcache_memory_bytes is not None:
            room = "the KV cache gets kvcache_memory_bytes"
        states = (
            [(f"states of {_count(config.max_num_seqs, 'sequence')}", _gib(memory.states))] if memory.states else []
        )
        rows = [
            ("runs", self.code),
            ("parameters", f"{self.num_parameters:,} in all"),
            (self.device.memory, f"{_gib(memory.total)}, of which {room}"),
            ("weights", f"{_gib(memory.weights)} in {self.format}"),
            ("activations and logits", f"{_gib(memory.activations)}, about"),
            *states,
            ("left for the KV cache", _gib(max(self.kv_budget, 0))),
            ("KV cache per token", f"{self.kv_bytes_per_token:,} bytes"),
            ("tokens in the KV cache", f"{self.num_tokens:,}"),
            (f"sequences of {config.max_model_len:,} tokens", f"{self.num_sequences:,.1f} at a time"),
        ]
        place = self.device.describe_place(config.num_ranks)
        table = [f"{config.model}, on {place}", *(f"  {name:<32}{value}" for name, value in rows)]
        return "\n".join([*table, self._verdict()])

    def _verdict(self) -> str:
        if self.fits:
            asked = self.config.max_num_seqs
            most = min(int(self.num_sequences), asked)
            if most == asked:
                return f"It fits: {_count(asked, 'sequence')} at a time, each as long as it may be."
            others = asked - most
            waiting = "one waits, unless" if others == 1 else f"{others} wait, or fewer of them if"
            full = f"{most} of {_count(asked, 'sequence')} (max_num_seqs) at full length"
            return f"It fits: {full}; the other {waiting} sequences are shorter."
        lacking = f"one sequence of {self.config.max_model_len:,} tokens" if self.kv_budget > 0 else "the model"
        advice = "; or ".join(self.advice) or f"no option alone, but {self.device.larger}"
        return f"It does not fit: there is no room for {lacking}. What would help: {advice}."


def describe_code(sizes: Sizes) -> str:
    """Return whose code computes a model, for a table. A model that nobody's code computes has no sizes."""
    count_modules = getattr(sizes.model, "count_modules", None)
    if count_modules is None:
        return "natively"
    return "through transformers' code; {} of {} modules are ours".format(*count_modules())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def estimate(hf_config: "PretrainedConfig", config: EngineConfig, memory: int | None) -> Estimate:
    """Return the estimate for a device of so many bytes. ValueError if the ranks cannot share the model.

    Args:
        config: its device is "cpu", or else a GPU that need not be here is meant.
        memory: None means what this machine has free, for a CPU.
    """
    is_cpu = config.device == "cpu"
    if memory is None and not is_cpu:
        raise ValueError("give --memory SIZE, the memory of one GPU; or --machine NAME, or --device cpu")
    resolved = resolve_options(config, hf_config, None if is_cpu else memory)
    memory = free_memory() if memory is None else memory
    estimated = _estimate(hf_config, resolved, memory * resolved.num_devices // resolved.num_ranks)
    if estimated.fits:
        return replace(estimated, config=fit_length(estimated.config, estimated.num_tokens // resolved.block_size))
    return replace(estimated, advice=tuple(_advise(hf_config, estimated)))


def _estimate(hf_config: "PretrainedConfig", config: ResolvedConfig, gpu_memory: int) -> Estimate:
    if config.pipeline_parallel_size == 1:
        shares = [Sizes(hf_config, config.tensor_parallel_size)]
    else:
        stages = choose_stages(hf_config, config.pipeline_parallel_size)
        decoders = [make_stage_decoder(find_decoder(hf_config), stage) for stage in stages]
        shares = [Sizes(hf_config, decoder=decoder) for decoder in decoders]
    # A layer needs most memory in its MLP, beside x and the residual. Sampling needs the logits in float32, and two
    # copies of them.
    dtype = getattr(torch, config.dtype)
    mlps: list[Any] = [layer.mlp for layer in shares[0].model.layers]
    widest = 2 * hf_config.hidden_size + max(mlp.count_activations() for mlp in mlps)
    logits = config.max_num_seqs * hf_config.vocab_size * 4
    activations = config.max_num_batched_tokens * widest * dtype.itemsize + 3 * logits
    memory = GpuMemory(gpu_memory, others=0, weights=0, activations=activations, graphs=0)
    quantizer = make_quantizer(config, hf_config)
    named = config.dtype if quantizer is None else quantizer.describe()
    whole = shares[0] if config.num_ranks == 1 else Sizes(hf_config)

    def estimate_share(one: Sizes) -> Estimate:
        weights = one.weight_bytes(dtype, quantizer)
        states = one.row_bytes(dtype) * (config.max_num_seqs + 1)
        taken = replace(memory, weights=weights, states=states)
        kv_bytes = one.kv_bytes(getattr(torch, config.kv_dtype))
        return Estimate(config, whole.num_parameters, taken, kv_bytes, named, describe_code(whole))

    estimates = [estimate_share(one) for one in shares]
    return min(estimates, key=lambda one: one.num_tokens)  # all stages have as many blocks as the poorest


def _advise(hf_config: "PretrainedConfig", estimated: Estimate) -> list[str]:
    """Return options that make the model fit, each of them alone."""
    config = estimated.config
    changes: list[dict[str, object]] = []
    if estimated.num_tokens:
        changes.append({"max_model_len": estimated.num_tokens})
    if config.dtype == "float32":
        changes.append({"dtype": "bfloat16"})
    if make_quantizer(config, hf_config) is None:
        changes.append({"quantization": "int8"})
    if config.kv_cache_dtype == "auto":
        changes.append({"kv_cache_dtype": "int8"})
    needed = config.max_blocks_per_seq * config.block_size * estimated.kv_bytes_per_token
    changes += [{"max_num_batched_tokens": 2048}, {"max_num_seqs": 64}]
    changes += estimated.device.list_changes(config, needed)
    advice: list[str] = []
    for change in changes:
        (name, value), *_ = change.items()
        if name == "tensor_parallel_size" and any("tensor" in line for line in advice):
            continue
        try:
            helps = _estimate(hf_config, replace(config, **change), estimated.memory.total).fits  # type: ignore[arg-type]
        except ValueError:
            continue
        if helps:
            advice.append(f"--{name.replace('_', '-')} {value}")
    return advice


MOST_REQUESTS = 16384
"""The steps of so many requests are added up. Of a longer file these are taken evenly, and stand for the others."""


def estimate_job(
    path: str,
    hf_config: "PretrainedConfig",
    estimated: Estimate,
    machine: Machine | None,
    defaults: Mapping[str, Any],
    typical: int,
) -> str:
    """Return the tokens, the steps and the least time of a file of requests, as text: see `ideal_steps`.

    They are told twice: for answers with the most tokens that they may have, and for answers of a typical length.
    Prompts with the same beginning count in full.

    Args:
        machine: None means this one, which is measured.
        defaults: the sampling parameters of lines that have no value of their own.
        typical: in the second estimate an answer has so many tokens, or the most that it may have if that is less.

    Raises:
        ValueError: the model has no tokenizer, or the file has no request that can run.
    """
    config = estimated.config
    if machine is None:
        try:
            device = resolve_device(config.device)
        except ValueError as error:
            raise ValueError(f"--input needs --machine NAME for a GPU that is not here: {error}") from error
        machine = measure_machine(device, getattr(torch, config.dtype))
    lengths, num_open, num_bad = read_lengths(path, hf_config, config, defaults)
    if not lengths:
        raise ValueError(f"{path} has no request that can run, and {num_bad} lines that cannot")
    model = Model.of(config, hf_config)
    whole = machine.times(config.num_devices)
    bad = f", and {num_bad} lines that cannot run" if num_bad else ""
    told = [f"{len(lengths):,} requests{bad}"]
    shorter = [(num_prompt, min(most, typical)) for num_prompt, most in lengths]
    if shorter == lengths:
        told += _describe_run(lengths, estimated, model, whole, "at most ")
    else:
        limit = f"{config.usual_length:,} tokens with their prompts"
        assumed = f" ({num_open:,} lines have no max_tokens: they count up to {limit})" if num_open else ""
        told += [f"if all answers are as long as they may be{assumed}:"]
        told += _describe_run(lengths, estimated, model, whole, "at most ")
        told += [f"if answers end after {typical:,} tokens, or before that at their max_tokens (--typical-output):"]
        told += _describe_run(shorter, estimated, model, whole, "")
    return "\n".join(told)


def _describe_run(
    lengths: list[tuple[int, int]], estimated: Estimate, model: Model, machine: Machine, most: str
) -> list[str]:
    """Return the tokens, the steps and the least time of requests, a line each.

    Args:
        lengths: (tokens of the prompt, tokens of the answer) of each request.
        most: words before the number of the answers' tokens.
    """
    config = estimated.config
    num_tokens = [sum(column) for column in zip(*lengths, strict=True)]
    some = lengths[:: -(-len(lengths) // MOST_REQUESTS)]
    room = max(estimated.num_tokens * len(lengths) // sum(num_tokens), 1)
    steps = list(ideal_steps(some, min(config.max_num_seqs, room), config.max_num_batched_tokens))
    floor = sum((step_cost(model, machine, *step) for step in steps), Cost())
    scale = len(lengths) / len(some)
    seconds = scale * floor.seconds
    return [
        f"  tokens                          {num_tokens[0]:,} of prompts, {most}{num_tokens[1]:,} of answers",
        f"  steps                           {round(scale * len(steps)):,}",
        f"  least time                      {seconds:,.3f} s, {num_tokens[1] / seconds:,.0f} tokens a second",
    ]


def read_lengths(
    path: str, hf_config: "PretrainedConfig", config: ResolvedConfig, defaults: Mapping[str, Any]
) -> tuple[list[tuple[int, int]], int, int]:
    """Return the lengths of a file's requests, how many lines have no max_tokens of their own, and how many are bad.

    The lengths are (tokens of the prompt, most tokens of the answer), for each answer.
    """
    model = open_model(config.model, [*CONFIGS, *TOKENIZER])
    tokenizer = read_tokenizer(config.tokenizer, model, config.max_model_len)
    if tokenizer is None:
        raise ValueError(f"--input needs a tokenizer, and {explain_no_tokenizer(model.path)}")
    params, refused = read_default_params(model)
    pooling = find_pooling(None, None, hf_config)
    facts = ModelFacts(default_params=params, refused_defaults=refused, origin=model.path, pooling=pooling)
    llm = LLM.__new__(LLM)
    llm.engine = assemble(config, facts, tokenizer, None, 1)  # type: ignore[arg-type]  # nothing will run
    lengths: list[tuple[int, int]] = []
    num_open = 0
    num_bad = 0
    for line in Reading(Source(path)):
        try:
            read = add_defaults(read_request_line(line), defaults)
            requests = prepare_line(read, llm, read.body.get("model", config.model))
        except LineError:
            num_bad += 1
            continue
        has_limit = any(read.body.get(name) is not None for name in ("max_tokens", "max_completion_tokens"))
        is_open = False
        for request in requests:
            num_prompt = len(request.prompt_token_ids)
            most = (request.max_len or config.max_model_len) - num_prompt
            if request.params.max_tokens is not None and request.params.max_tokens < most:
                most = request.params.max_tokens
            else:
                is_open = not has_limit
            lengths += [(num_prompt, max(most, 1))] * request.params.n
        num_open += is_open
    return lengths, num_open, num_bad
