"""Facts beside requests and options that decide the tokens of a run: the model, and versions of what computes."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from nanovllm.version import __version__

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

MODEL = ("*.json", "*.txt", "*.jinja", "*.safetensors")
"""The files that configure a model, its tokenizer and its chat template, and its shards."""
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""The files of a LoRA adapter."""

MAX_HEADER = 100_000_000  # bytes: safetensors' own limit


def read_provenance(engine: "LLMEngine") -> dict[str, str]:
    """Return the model's digest, versions and device. A resumed job may go on only if they are the same.

    Raises:
        ValueError: a file of the model cannot be read.
    """
    config = engine.config
    origin = engine.facts.origin
    optional = {}
    if config.lora is not None:
        optional["lora"] = digest_files(Path(config.lora).expanduser(), ADAPTER, with_tensors=True)
    if config.quantization is not None:
        optional["quantization"] = config.quantization
    return {
        "model": digest_files(origin, MODEL, with_tensors=False) if isinstance(origin, Path) else origin,
        **optional,
        "dtype": config.dtype,
        "device": config.device.split(":")[0],
        "attention_backend": config.attention_backend,
        "nanovllm": __version__,
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def digest_files(folder: Path, patterns: Sequence[str], with_tensors: bool) -> str:
    """Return a hexadecimal digest of a folder's files: of their sizes and contents. ValueError if one cannot be read.

    Args:
        with_tensors: read all of the files of tensors, or only their headers, which name every tensor.
    """
    digest = xxhash.xxh3_128()
    try:
        for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            with open(path, "rb") as file:
                if path.suffix == ".safetensors" and not with_tensors:
                    content = file.read(8)
                    content += file.read(min(int.from_bytes(content, "little"), MAX_HEADER))
                else:
                    content = file.read()
            digest.update(f"{path.name}/{path.stat().st_size}/{len(content)}/".encode() + content)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error}") from error
    return digest.hexdigest()
