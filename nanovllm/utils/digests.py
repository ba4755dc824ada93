"""Digests of files that decide tokens: those of a model, and those of an adapter."""

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""The files of a LoRA adapter."""

BYTES_AT_A_TIME = 1 << 22


def digest_files(folder: Path, patterns: Sequence[str], without: Sequence[str] = ()) -> str:
    """Return a hexadecimal digest of the files of a folder whose names match; see `digest_contents`.

    Args:
        without: patterns of files that do not count.
    """
    others = {path for pattern in without for path in folder.glob(pattern)}
    return digest_contents(sorted({path for pattern in patterns for path in folder.glob(pattern)} - others))


def digest_contents(paths: Sequence[Path]) -> str:
    """Return a hexadecimal digest of some files: of their names, sizes and bytes. ValueError if one cannot be read."""
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
    return digest_files(Path(folder).expanduser(), ADAPTER)


def find_lacking(folder: Path) -> str | None:
    """Return the name of a file of an adapter that a folder does not have; None if it has them all."""
    return next((name for name in ADAPTER if not (folder / name).is_file()), None)
