"""Reads the settings of quantisation of older checkpoints, which have them in a file beside config.json."""

import logging
from pathlib import Path
from typing import Any

from nanovllm.models.hub import QUANTIZATION_CONFIGS
from nanovllm.models.model_config import is_about_cache_alone, read_json, take_text_config
from nanovllm.models.weight_reader import checkpoint_files, find_names

logger = logging.getLogger(__name__)

CODES = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""The ends of names of tensors of which each shows that a checkpoint has quantised matrices."""

SETTINGS_FILE = "settings_file"
"""The key of a quantization_config that names the file which it comes from, if that is not config.json."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json, with a quantization_config that another file may have."""
    return add_settings(take_text_config(read_json(folder / "config.json")), folder)


def add_settings(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a config.json with the quantization_config that another file has, if it has none itself.

    Such a file is no more than a leftover if no weights are quantised.

    Raises:
        ValueError: a file cannot be read.
    """
    if data.get("quantization_config") or data.get("compression_config"):
        return data
    settings = find_settings(folder)
    if settings is None or is_about_cache_alone(settings):
        return data
    if any(folder.glob("*.safetensors")):
        names = find_names(checkpoint_files(folder))
        if not any(name.endswith(CODES) for name in names):
            logger.info("%s of %s is not read: no tensor is quantised", settings[SETTINGS_FILE], folder)
            return data
    return data | {"quantization_config": settings}


def find_settings(folder: Path) -> dict[str, Any] | None:
    """Return the content of such a file, in the form that a config.json has it; None if there is no such file."""
    name = next((name for name in QUANTIZATION_CONFIGS if (folder / name).is_file()), None)
    if name is None:
        return None
    data = read_json(folder / name)
    if name == "hf_quant_config.json":  # of NVIDIA's ModelOpt
        method = "modelopt"
        data = data["quantization"] if isinstance(data.get("quantization"), dict) else data
    else:
        method = "awq" if name == "quant_config.json" or "w_bit" in data else "gptq"
    return {"quant_method": method, **data, SETTINGS_FILE: name}
