"""Where a model's files are: in the box, in a local folder, or downloaded from a Hugging Face hub."""

import re
from pathlib import Path
from typing import Any

from nanovllm.models.config import read_json
from nanovllm.models.presets import PRESETS, preset_config
from nanovllm.utils.checks import quote, refuse

BOX = "tiny-qwen3"
CONFIGS = ["config.json", "generation_config.json"]
TOKENIZER = ["tokenizer*", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*"]
PATTERNS = ["*.safetensors", "*.safetensors.index.json", *CONFIGS, *TOKENIZER]
"""Of a repository's files, those that are downloaded."""


def find_model(model: str, revision: str | None = None) -> Path:
    """The folder with the model's files; a hub id is downloaded first, through huggingface_hub and its cache.

    Args:
        revision: of a hub id: a branch, a tag or a commit.

    Raises:
        ValueError: there is no such folder or id, or the folder has no config.json.
    """
    folder = find_folder(model)
    if folder is not None and revision is not None:
        raise refuse(revision, "revision", f"left out: {folder} is a folder, which has no revisions")
    if folder is None and model.lower() in PRESETS:
        raise ValueError(
            f'model {model!r} is the name of a shape, without weights: use load_format="dummy" for random ones, '
            f'or the id "{PRESETS[model.lower()]}"'
        )
    return folder or download(model, PATTERNS, revision)


def find_config(model: str, revision: str | None, load_format: str) -> tuple[Path | None, str, dict[str, Any]]:
    """A model's folder (None: a shape alone, for random weights), where its config.json is, and what that says.

    Raises:
        ValueError: there is no such model.
    """
    if load_format == "dummy" and model.lower() in PRESETS:
        return None, f"preset {model.lower()}", preset_config(model.lower())
    folder = find_model(model, revision)
    return folder, str(folder / "config.json"), read_json(folder / "config.json")


def find_folder(model: str) -> Path | None:
    """The model in the box, or a local folder, with a config.json; None if there is no such folder."""
    path = Path(__file__).parent.parent / "assets" / BOX if model == BOX else as_path(model)
    if not path.is_dir():
        return None
    if not (path / "config.json").is_file():
        raise ValueError(f"model folder {path} has no config.json")
    for entry in path.glob("*"):  # a pipe or a device would be read for ever
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise ValueError(f"model folder {path} has {quote(entry.name)}, which is neither a file nor a folder")
    return path


def as_path(model: str) -> Path:
    """Raises a ValueError for what no path can be."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; the home of a user who is not there
        raise ValueError(f"model {quote(model)} cannot be a folder: {quote(error.args[-1])}") from error
    return path


def download(model: str, patterns: list[str], revision: str | None = None) -> Path:
    """A folder with those of a hub id's files that match."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise ValueError(f"model folder {quote(model)} does not exist")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise ValueError(
            f"model {quote(model)} is neither a local folder, nor a shape ({', '.join(PRESETS)}), "
            f"nor an id that could be downloaded: {error}"
        ) from error
