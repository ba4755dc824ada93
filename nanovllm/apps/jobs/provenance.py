"""Facts beside requests and options that decide the tokens of a run: the model, and versions of what computes."""

import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from platform import machine
from typing import TYPE_CHECKING

import torch
import xxhash

from nanovllm.backends.cpu.library import LANES, cache_folder, describe_target, find_compiler
from nanovllm.load import find_config
from nanovllm.models.hub import TOKENIZER as OWN_TOKENIZER
from nanovllm.models.hub import find_tokenizer
from nanovllm.models.model_config import OTHERS, find_family, load_model_config
from nanovllm.utils.digests import digest_adapter, digest_contents, digest_files
from nanovllm.version import __version__

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

Stamp = tuple[Path, int, int, int]
"""The path, the bytes, the time of the last change and the inode of a file: see `ModelFolder.stamps`."""
SLOW = 4 << 30
"""More bytes than that take seconds to read."""
TOKENIZER = ("*.json", "*.txt", "*.jinja", "additional_chat_templates/*.jinja")
"""The files that configure a tokenizer and its chat templates."""
MODEL = (*TOKENIZER, "*_Pooling/*.json", "*_Dense/*.json", "*_Dense/*.safetensors", "*_LogitScore/*.json")
"""The files that configure a model, its tokenizer, its chat templates and its vectors."""

logger = logging.getLogger(__name__)


def digest_model(origin: Path | str, stamps: Sequence[Stamp], has_tokenizer: bool) -> str:
    """Return what tells a model from others: a digest of all bytes of its files, or the name of a preset.

    Args:
        origin: a folder, the file of a model in GGUF, or a preset.
        stamps: those of the checkpoint's files; none if the weights are random.
        has_tokenizer: whether another tokenizer takes the place of a folder's own, whose files do not count then.
    """
    if isinstance(origin, str):
        return origin
    settings = digest_contents([origin]) if origin.is_file() and not stamps else ""
    if origin.is_dir():
        settings = digest_files(origin, MODEL, without=OWN_TOKENIZER if has_tokenizer else ())
    return xxhash.xxh3_128_hexdigest((settings + digest_checkpoint(stamps)).encode()) if stamps else settings


def digest_checkpoint(stamps: Sequence[Stamp]) -> str:
    """Return the digest of a checkpoint's files. It is computed once, and kept while the files have these stamps.

    It is kept beside the compiled kernels. If that folder cannot be written, it is computed each time.
    """
    kept = cache_folder() / f"checkpoint-{xxhash.xxh3_128_hexdigest(repr(stamps).encode())}"
    with suppress(OSError):
        if len(digest := kept.read_text()) == 32:
            return digest
    files = [path for path, *_ in stamps]
    if (size := sum(size for _, size, *_ in stamps)) > SLOW:
        logger.info("reading %.1f GB once, for a digest that tells this model from others", size / 1e9)
    digest = digest_contents(files)
    with suppress(OSError):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = kept.with_name(f"{kept.name}.{secrets.token_hex(8)}")
        new.write_text(digest)
        os.replace(new, kept)
    return digest


def find_doubt(engine: "LLMEngine") -> str | None:
    """Return why an answer may depend on what runs beside it; None if it has the same bits in any company.

    See docs/same-bits.md.
    """
    config = engine.config
    if config.attention_backend != "cpu":
        return f'attention_backend is {config.attention_backend!r}; "cpu" has the same bits'
    if config.tensor_parallel_size > 1:
        return f"tensor_parallel_size is {config.tensor_parallel_size}; ranks add in an order of their own"
    _, source, data = find_config(config.model, config.revision, config.load_format)
    hf_config = load_model_config(data, source, config.model_impl)
    if find_family(hf_config) is OTHERS:
        return "the model runs through transformers' code"
    sizes = {name: getattr(hf_config, name, None) for name in ("hidden_size", "intermediate_size")}
    odd = [f"{name} is {size}" for name, size in sizes.items() if size is not None and size % LANES]
    return f"{odd[0]}, which is no multiple of {LANES}" if odd else None


def describe_processor(engine: "LLMEngine") -> str:
    """Return what may round otherwise where versions are equal: a CPU and its compiler, or a GPU."""
    if engine.config.device != "cpu":
        return torch.cuda.get_device_name(engine.config.device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), machine())
    compiler = find_compiler()
    target = "" if compiler is None else xxhash.xxh3_64_hexdigest(describe_target(compiler).encode())
    return f"{name} {target}".rstrip()


def read_teacher(engine: "LLMEngine") -> dict[str, str]:
    """Return the provenance of arrays of token ids: also the digest of the tokenizer in the model's folder."""
    origin = engine.facts.origin
    own = {}
    if isinstance(origin, Path) and origin.is_dir():
        own["tokenizer"] = digest_files(origin, OWN_TOKENIZER)
    return own | read_provenance(engine)


def read_provenance(engine: "LLMEngine") -> dict[str, str]:
    """Return the model's digest, versions and device. A resumed job may go on only if they are the same.

    Raises:
        ValueError: a file of the model cannot be read.
    """
    config = engine.config
    origin = engine.facts.origin
    optional = {}
    if config.tokenizer is not None:
        optional["tokenizer"] = digest_files(find_tokenizer(config.tokenizer), TOKENIZER)
    if config.lora is not None:
        optional["lora"] = digest_adapter(config.lora)
    if config.quantization is not None:
        optional["quantization"] = config.quantization
    return {
        "model": digest_model(origin, engine.facts.stamps, config.tokenizer is not None),
        **optional,
        "dtype": config.dtype,
        "device": config.device.split(":")[0],
        "attention_backend": config.attention_backend,
        "nanovllm": __version__,
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
