"""Finds a model's files: in the package, in a local folder, or on a Hugging Face hub."""

import re
from pathlib import Path

from nanovllm.utils.checks import quote, refuse

BOX = "tiny-qwen3"
QUANTIZATION_CONFIGS = ["quantize_config.json", "quant_config.json", "hf_quant_config.json"]
"""The files of older tools with the settings of quantisation. Newer ones write them into config.json."""
CONFIGS = ["config.json", "generation_config.json", *QUANTIZATION_CONFIGS]
TOKENIZER = [
    *("tokenizer*", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*"),
    "additional_chat_templates/*",
]
POOLING = [
    "modules.json",
    "*sentence_*.json",
    "*_Pooling/config.json",
    "*_Dense/config.json",
    "*_Normalize/config.json",
]
PATTERNS = ["*.safetensors", "*.safetensors.index.json", *CONFIGS, *TOKENIZER, *POOLING]
"""The files of a repository that are downloaded."""


class ModelNotFoundError(ValueError):
    """There is no folder of this name, and no model that could be downloaded."""


def find_model(model: str, revision: str | None = None) -> Path:
    """Return the folder with the model's files. A hub id is downloaded first, through huggingface_hub and its cache.

    Args:
        revision: a branch, a tag or a commit of a hub id. A folder has no revisions; for it None and "main", which
            scripts send as a default, are the files that are there.

    Raises:
        ValueError: there is no such folder or id, or the folder has no config.json.
    """
    folder = find_folder(model)
    if folder is not None and revision not in (None, "main"):
        raise refuse(revision, "revision", f'left out, or "main": {folder} is a folder, which has no revisions')
    return folder or download(model, PATTERNS, revision)


def is_gguf(model: str) -> bool:
    """Return whether a model is in GGUF: a file, a folder that has no safetensors beside one, or a hub id that says so.

    Such ids have "gguf" in their name, or the quantisation behind a colon.
    """
    path = as_path(model)
    if path.is_file():
        with path.open("rb") as file:
            return path.suffix.lower() == ".gguf" or file.read(4) == b"GGUF"
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    names_quantisation = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+:[\w.-]+", model) is not None
    return "gguf" in model.lower() or names_quantisation


def find_folder(model: str) -> Path | None:
    """Return the folder of the model in the package, or a local folder; None if there is no such folder."""
    path = Path(__file__).parent.parent / "assets" / BOX if model == BOX else as_path(model)
    if path.is_file():
        raise ValueError(f"model {path} is a file; a model is a folder with config.json and safetensors files")
    if not path.is_dir():
        return None
    if not (path / "config.json").is_file():
        raise ValueError(f"model folder {path} has no config.json")
    check_entries(path, "model")
    return path


def find_tokenizer(name: str) -> Path:
    """Return the folder that the option `tokenizer` names. Of a hub id the tokenizer's files are downloaded.

    Raises:
        ValueError: there is no such folder or id.
    """
    path = find_folder(name) if name == BOX else as_path(name, "tokenizer")
    if path is not None and path.is_dir():
        check_entries(path, "tokenizer")
        return path
    if path is not None and path.is_file():
        raise ValueError(f"tokenizer {path} is a file; it must be the folder with a tokenizer.json, or a hub id")
    try:
        return fetch(name, ["config.json", *TOKENIZER], None, "tokenizer")
    except ModelNotFoundError as error:  # advice on it would be about the model
        raise ValueError(str(error)) from error


def check_entries(path: Path, option: str) -> None:
    """Raise a ValueError if a folder has a pipe or a device, which would be read for ever."""
    for entry in path.glob("*"):
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise ValueError(f"{option} folder {path} has {quote(entry.name)}, which is neither a file nor a folder")


def as_path(folder: str, option: str = "model") -> Path:
    """Return the folder that an option names as a path; raises a ValueError if it cannot be one."""
    try:
        path = Path(folder).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; the home of a user who is not there
        raise ValueError(f"{option} {quote(folder)} cannot be a folder: {quote(error.args[-1])}") from error
    return path


def download(model: str, patterns: list[str], revision: str | None = None) -> Path:
    """Download the files of a model that match the patterns; returns their folder, which has a config.json."""
    folder = fetch(model, patterns, revision, "model")
    if not (folder / "config.json").is_file():
        raise ValueError(f"model {quote(model)}: the download in {folder} has no config.json")
    return folder


def fetch(name: str, patterns: list[str], revision: str | None, option: str) -> Path:
    """Download the files of a hub id that match the patterns; returns their folder.

    Args:
        option: the option that names the id, for messages.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise ModelNotFoundError(f"{option} folder {quote(name)} does not exist")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        kinds = "a local folder, nor a shape" if option == "model" else "a local folder"
        raise ModelNotFoundError(
            f"{option} {quote(name)} is neither {kinds}, nor an id that could be downloaded: {shorten_reason(error)}"
        ) from error


def shorten_reason(error: Exception) -> str:
    """Return the first two lines of huggingface_hub's error: the second one says what a status of HTTP means."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
