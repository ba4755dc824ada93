"""Facts beside requests and options that decide the tokens of a run: the model, and versions of what computes."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.models.hub import find_tokenizer
from nanovllm.utils.digests import digest_adapter, digest_contents, digest_files
from nanovllm.version import __version__

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

TOKENIZER = ("*.json", "*.txt", "*.jinja")
"""The files that configure a tokenizer and its chat template."""
MODEL = (*TOKENIZER, "*.safetensors", "*_Pooling/*.json", "*_Dense/*.json", "*_Dense/*.safetensors")
"""The files that configure a model, its tokenizer, its chat template and its vectors, and its shards."""


def digest_model(origin: Path | str, files: list[Path]) -> str:
    """Return what tells a model from others: a digest of its files, or the name of a preset.

    Of a folder the headers of the files of tensors count, because tools that change a model change them, too. A model
    in GGUF is made again by the same tool with other numbers under an equal header, so all bytes count.

    Args:
        origin: a folder, the file of a model in GGUF, or a preset.
        files: those of the checkpoint.
    """
    if isinstance(origin, str):
        return origin
    if origin.is_file():
        return digest_contents(files or [origin])
    return digest_files(origin, MODEL, with_tensors=False)


def read_provenance(engine: "LLMEngine") -> dict[str, str]:
    """Return the model's digest, versions and device. A resumed job may go on only if they are the same.

    Raises:
        ValueError: a file of the model cannot be read.
    """
    config = engine.config
    origin = engine.facts.origin
    optional = {}
    if config.tokenizer is not None:
        optional["tokenizer"] = digest_files(find_tokenizer(config.tokenizer), TOKENIZER, with_tensors=False)
    if config.lora is not None:
        optional["lora"] = digest_adapter(config.lora)
    if config.quantization is not None:
        optional["quantization"] = config.quantization
    return {
        "model": digest_model(origin, [path for path, *_ in engine.facts.stamps]),
        **optional,
        "dtype": config.dtype,
        "device": config.device.split(":")[0],
        "attention_backend": config.attention_backend,
        "nanovllm": __version__,
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
