"""Facts beside requests and options that decide the tokens of a run: the model, and versions of what computes."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from nanovllm.version import __version__

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

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
    return {
        "model": model_digest(origin) if isinstance(origin, Path) else origin,
        **({"lora": digest_adapter(config.lora)} if config.lora is not None else {}),
        **({"quantization": config.quantization} if config.quantization is not None else {}),
        "dtype": config.dtype,
        "device": config.device.split(":")[0],
        "attention_backend": config.attention_backend,
        "nanovllm": __version__,
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def model_digest(folder: Path) -> str:
    """Return a hexadecimal digest of a model's folder that tells it from other models, without reading its weights.

    The digest covers the sizes of all files, the headers of the shards (which name every tensor), and the contents of
    the files that configure the model, its tokenizer and its chat template. ValueError if a file cannot be read.
    """
    digest = xxhash.xxh3_128()
    patterns = ("*.json", "*.txt", "*.jinja", "*.safetensors")
    try:
        for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            with open(path, "rb") as file:
                if path.suffix == ".safetensors":
                    content = file.read(8)
                    content += file.read(min(int.from_bytes(content, "little"), MAX_HEADER))
                else:
                    content = file.read()
            digest.update(f"{path.name}/{path.stat().st_size}/{len(content)}/".encode() + content)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error}") from error
    return digest.hexdigest()


def digest_adapter(folder: str) -> str:
    """Return a hexadecimal digest of an adapter's two files; ValueError if one cannot be read."""
    digest = xxhash.xxh3_128()
    try:
        for name in ADAPTER:
            digest.update((Path(folder).expanduser() / name).read_bytes())
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error}") from error
    return digest.hexdigest()
