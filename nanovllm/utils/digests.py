"""Digests of files that decide tokens: those of a model, and those of an adapter."""

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""The files of a LoRA adapter."""

BYTES_AT_A_TIME = 1 << 22
MAX_HEADER = 100_000_000  # bytes: safetensors' own limit


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


def digest_contents(paths: Sequence[Path]) -> str:
    """Return a hexadecimal digest of all bytes of some files; ValueError if one cannot be read."""
    digest = xxhash.xxh3_128()
    try:
        for path in paths:
            digest.update(f"{path.name}/{path.stat().st_size}/".encode())
            with open(path, "rb") as file:
                while part := file.read(BYTES_AT_A_TIME):
                    digest.update(part)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def digest_adapter(folder: str | os.PathLike[str]) -> str:
    """Return a hexadecimal digest of an adapter's content: see `digest_files`."""
    return digest_files(Path(folder).expanduser(), ADAPTER, with_tensors=True)


def find_lacking(folder: Path) -> str | None:
    """Return the name of a file of an adapter that a folder does not have; None if it has them all."""
    return next((name for name in ADAPTER if not (folder / name).is_file()), None)
