"""What fits into a GPU: weights, KV cache, sequences, from config.json alone."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.models.config import Shape, limit_length, load_model_config, read_json
from nanovllm.models.hub import PRESETS, as_path, download, find_folder, preset_config
from nanovllm.runner.kv_memory import GpuMemory
from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_UNITS = {"": 1, "B": 1, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of "80GB", "80GiB", "80G" or a plain number. Makers of GPUs write GB for 2**30 bytes, and so it is read."""
    match = re.fullmatch(r"([\d.]+)\s*(?:([MGT])(?:i?B)?|B)?", text.strip(), re.IGNORECASE)
    try:
        size = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    except ValueError:
        size = 0
    if size <= 0:
        raise ValueError(f"--gpu-memory is {quote(text)}; it must be a size such as 80GB")
    return size


def read_config(model: str) -> "PretrainedConfig":
    """The configuration of a shape, a folder, a config.json, or a hub id, of which nothing else is fetched.

    An id that names a shape, such as Qwen/Qwen3-8B, is that shape, and nothing is fetched at all.

    Raises:
        ValueError: there is no such model, or one that is not supported.
    """
    path, shape = as_path(model), model.rpartition("/")[2].lower()
    if model.lower() in (shape, PRESETS.get(shape, "").lower()) and shape in PRESETS and not path.exists():
        return load_model_config(preset_config(shape), f"preset {shape}")
    if not path.is_file():
        path = (find_folder(model) or download(model, ["config.json"])) / "config.json"
    return load_model_config(read_json(path), str(path))


@dataclass(frozen=True)
class Estimate:
    """What each rank's GPU holds.

    Attributes:
        memory: of the GPU; its activations are a guess.
        advice: options that would make it fit.
    """

    config: ResolvedConfig
    num_parameters: int
    memory: GpuMemory
    kv_bytes_per_token: int
    advice: tuple[str, ...] = ()

    @property
    def kv_budget(self) -> int:
        """Bytes left for the KV cache, below 0 if the rest does not fit."""
        return self.memory.left_for_cache(self.config.gpu_memory_utilization)

    @property
    def num_tokens(self) -> int:
        """Tokens of KV cache, in whole blocks."""
        size = self.config.block_size
        return max(self.kv_budget, 0) // (self.kv_bytes_per_token * size) * size

    @property
    def num_sequences(self) -> float:
        """Sequences of max_model_len that the cache holds at a time."""
        return self.num_tokens / (self.config.max_blocks_per_seq * self.config.block_size)

    @property
    def fits(self) -> bool:
        return self.num_sequences >= 1

    def describe(self) -> str:
        """A table, and a sentence that says whether it fits."""
        config, memory, use = self.config, self.memory, self.config.gpu_memory_utilization
        rows = [
            ("parameters", f"{self.num_parameters:,} in all"),
            ("GPU memory", f"{_gib(memory.total)}, of which gpu_memory_utilization={use:g} is used"),
            ("weights", f"{_gib(memory.weights)} in {config.dtype}"),
            ("activations and logits", f"{_gib(memory.activations)}, about"),
            ("left for the KV cache", _gib(max(self.kv_budget, 0))),
            ("KV cache per token", f"{self.kv_bytes_per_token:,} bytes"),
            ("tokens in the KV cache", f"{self.num_tokens:,}"),
            (f"sequences of {config.max_model_len:,} tokens", f"{self.num_sequences:,.1f} at a time"),
        ]
        ranks = config.tensor_parallel_size
        title = f"{config.model}, on each of {ranks} GPUs" if ranks > 1 else f"{config.model}, on one GPU"
        table = [title, *(f"  {name:<32}{value}" for name, value in rows)]
        return "\n".join([*table, self._verdict()])

    def _verdict(self) -> str:
        if self.fits:
            most = min(int(self.num_sequences), self.config.max_num_seqs)
            return f"It fits: {most} full-length sequences run at a time, and more of them the shorter they are."
        what = f"one sequence of {self.config.max_model_len:,} tokens" if self.kv_budget > 0 else "the model"
        help = "; or ".join(self.advice) or "no option alone, but a larger GPU"
        return f"It does not fit: there is no room for {what}. What would help: {help}."


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def estimate(hf_config: "PretrainedConfig", config: EngineConfig, gpu_memory: int) -> Estimate:
    """What fits; ValueError if the ranks cannot share the model."""
    found = _measure(hf_config, _resolve(hf_config, config), gpu_memory)
    return found if found.fits else replace(found, advice=tuple(_advise(hf_config, found)))


def _resolve(hf_config: "PretrainedConfig", config: EngineConfig) -> ResolvedConfig:
    """The values that "auto" has on a GPU; the larger of the block sizes, which wastes more."""
    from nanovllm.resolve import TOKEN_BUDGETS

    own_dtype = str(hf_config.dtype or "float32").removeprefix("torch.")
    resolved = {
        "device": "cuda:0",
        "dtype": own_dtype if config.dtype == "auto" else config.dtype,
        "block_size": 256 if config.kvcache_block_size == "auto" else config.kvcache_block_size,
        "max_model_len": limit_length(hf_config, config.max_model_len),
        "max_num_batched_tokens": config.max_num_batched_tokens or TOKEN_BUDGETS["cuda"],
        "use_graphs": not config.enforce_eager,
        "depth": 2,
    }
    return ResolvedConfig(**{**vars(config), **resolved})


def _measure(hf_config: "PretrainedConfig", config: ResolvedConfig, gpu_memory: int) -> Estimate:
    shape, item = Shape.from_config(hf_config), DTYPE_BYTES[config.dtype]
    mine = shape.shard(config.tensor_parallel_size)
    # At its widest, a layer holds x, the residual, and gate and up with their product, for each of a token's experts;
    # sampling holds the logits, in float32, and two copies.
    inner = max(3 * mine.intermediate, shape.experts_per_token * (3 * mine.expert_intermediate + shape.hidden))
    widest = config.max_num_batched_tokens * (2 * shape.hidden + inner)
    activations = widest * item + 3 * config.max_num_seqs * shape.vocab * 4
    memory = GpuMemory(gpu_memory, others=0, weights=mine.num_parameters * item, activations=activations, graphs=0)
    return Estimate(config, shape.num_parameters, memory, mine.kv_bytes(item))


def _advise(hf_config: "PretrainedConfig", found: Estimate) -> list[str]:
    """Changes of one option each that make it fit."""
    config = found.config
    changes: list[dict[str, object]] = []
    if found.num_tokens:
        changes.append({"max_model_len": found.num_tokens})
    if config.dtype == "float32":
        changes.append({"dtype": "bfloat16"})
    changes += [{"max_num_batched_tokens": 2048}, {"max_num_seqs": 64}, {"gpu_memory_utilization": 0.95}]
    changes += [{"tensor_parallel_size": ranks} for ranks in (2, 4, 8) if ranks > config.tensor_parallel_size]
    advice: list[str] = []
    for change in changes:
        (name, value), *_ = change.items()
        if name == "tensor_parallel_size" and any("tensor" in line for line in advice):
            continue
        try:
            helps = _measure(hf_config, replace(config, **change), found.memory.total).fits  # type: ignore[arg-type]
        except ValueError:
            continue
        if helps:
            advice.append(f"--{name.replace('_', '-')} {value}")
    return advice
