"""Estimates from config.json alone whether a model fits into a GPU, and how many tokens of KV cache are left.

Quantised weights count in their own format.
"""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.backends.gpu.memory import GpuMemory
from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.distributed.stage_decoder import make_stage_decoder
from nanovllm.distributed.stages import choose_stages
from nanovllm.load import make_quantizer, resolve_options
from nanovllm.models.diagnosis import explain
from nanovllm.models.hub import as_path, download, find_folder
from nanovllm.models.model_config import find_decoder, load_model_config, read_json
from nanovllm.models.shapes import PRESETS, preset_config
from nanovllm.models.sizes import Sizes
from nanovllm.quantized.checkpoints import describe_format, find_format
from nanovllm.utils.checks import quote

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
        raise ValueError(f"--gpu-memory is {quote(text)}; it must be a size such as 80GB")
    return size


def fetch_config(model: str) -> "PretrainedConfig":
    """Return the configuration of a shape, a folder, a config.json or a Hugging Face id.

    Of an id only config.json is fetched, and nothing if the id names a shape, as Qwen/Qwen3-8B does.

    Raises:
        ValueError: there is no such model, or one that is not supported.
    """
    try:
        path = as_path(model)
        shape = model.rpartition("/")[2].lower()
        if model.lower() in (shape, PRESETS.get(shape, "").lower()) and shape in PRESETS and not path.exists():
            return load_model_config(preset_config(shape), f"preset {shape}")
        if not path.is_file():
            path = (find_folder(model) or download(model, ["config.json"])) / "config.json"
        return load_model_config(read_json(path), str(path))
    except ValueError as error:
        raise explain(error, model) or error from error


@dataclass(frozen=True)
class Estimate:
    """The memory that each rank's GPU would hold.

    Attributes:
        num_parameters: the parameters of the whole model.
        memory: the bytes on one GPU. The activations are estimated.
        format: how the weights are stored, such as "bfloat16" or "int8".
        advice: options that would make the model fit; empty if it fits.
    """

    config: ResolvedConfig
    num_parameters: int
    memory: GpuMemory
    kv_bytes_per_token: int
    format: str
    advice: tuple[str, ...] = ()

    @property
    def kv_budget(self) -> int:
        """Bytes left for the KV cache; negative if the rest does not fit."""
        return self.memory.left_for_cache(self.config.gpu_memory_utilization)

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
        return self.num_sequences >= 1

    def describe(self) -> str:
        """Return a table, and a sentence that says whether the model fits."""
        config = self.config
        memory = self.memory
        share = config.gpu_memory_utilization
        rows = [
            ("parameters", f"{self.num_parameters:,} in all"),
            ("GPU memory", f"{_gib(memory.total)}, of which gpu_memory_utilization={share:g} is used"),
            ("weights", f"{_gib(memory.weights)} in {self.format}"),
            ("activations and logits", f"{_gib(memory.activations)}, about"),
            ("left for the KV cache", _gib(max(self.kv_budget, 0))),
            ("KV cache per token", f"{self.kv_bytes_per_token:,} bytes"),
            ("tokens in the KV cache", f"{self.num_tokens:,}"),
            (f"sequences of {config.max_model_len:,} tokens", f"{self.num_sequences:,.1f} at a time"),
        ]
        if memory.states:
            rows.insert(4, (f"states of {config.max_num_seqs} sequences", _gib(memory.states)))
        ranks = config.num_ranks
        title = f"{config.model}, on each of {ranks} GPUs" if ranks > 1 else f"{config.model}, on one GPU"
        table = [title, *(f"  {name:<32}{value}" for name, value in rows)]
        return "\n".join([*table, self._verdict()])

    def _verdict(self) -> str:
        if self.fits:
            most = min(int(self.num_sequences), self.config.max_num_seqs)
            return f"It fits: {most} full-length sequences run at a time, and more of them the shorter they are."
        lacking = f"one sequence of {self.config.max_model_len:,} tokens" if self.kv_budget > 0 else "the model"
        advice = "; or ".join(self.advice) or "no option alone, but a larger GPU"
        return f"It does not fit: there is no room for {lacking}. What would help: {advice}."


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def estimate(hf_config: "PretrainedConfig", config: EngineConfig, gpu_memory: int) -> Estimate:
    """Return the estimate for a GPU of so many bytes. ValueError if the ranks cannot share the model."""
    estimated = _estimate(hf_config, resolve_options(config, hf_config, gpu_memory), gpu_memory)
    return estimated if estimated.fits else replace(estimated, advice=tuple(_advise(hf_config, estimated)))


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
    format = find_format(config.quantization, hf_config)
    named = config.dtype if format is None else describe_format(format, config.dtype)
    num_parameters = Sizes(hf_config).num_parameters

    def estimate_share(one: Sizes) -> Estimate:
        weights = one.weight_bytes(dtype, quantizer)
        states = one.row_bytes(dtype) * (config.max_num_seqs + 1)
        taken = replace(memory, weights=weights, states=states)
        return Estimate(config, num_parameters, taken, one.kv_bytes(getattr(torch, config.kv_dtype)), named)

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
    if find_format(config.quantization, hf_config) is None:
        changes.append({"quantization": "int8"})
    if config.kv_cache_dtype == "auto":
        changes.append({"kv_cache_dtype": "int8"})
    changes += [{"max_num_batched_tokens": 2048}, {"max_num_seqs": 64}, {"gpu_memory_utilization": 0.95}]
    changes += [{"tensor_parallel_size": ranks} for ranks in (2, 4, 8) if ranks > config.tensor_parallel_size]
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
