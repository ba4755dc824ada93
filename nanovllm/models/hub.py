"""Where a model's files are: in the box, in a local folder, or downloaded from a Hugging Face hub."""

import re
from pathlib import Path

from nanovllm.models.presets import PRESETS

BOX = "tiny-qwen3"
PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
]


def find_model(model: str) -> Path:
    """The folder with the model's files; a hub id is downloaded first, through huggingface_hub and its cache.

    Raises:
        ValueError: there is no such folder or id, or the folder has no config.json.
    """
    path = Path(__file__).parent.parent / "assets" / BOX if model == BOX else Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model folder {path} has no config.json")
        return path
    if model.lower() in PRESETS:
        raise ValueError(
            f'model {model!r} is the name of a shape, without weights: use load_format="dummy" for random ones, '
            f'or the id "Qwen/{model.title().replace("b", "B")}"'
        )
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise ValueError(f"model folder {model} does not exist")
    return _download(model)


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise ValueError(
            f"model {model!r} is neither a local folder nor an id that could be downloaded: {error}"
        ) from error
