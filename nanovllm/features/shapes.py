"""Shapes of published models, by name. With load_format="dummy" they need no download.

assets/shapes.json has what each model's config.json says of its sizes and operators, by the model's hub id.
"""

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "assets" / "shapes.json"
PRESETS = {model.rpartition("/")[2].lower(): model for model in json.loads(_FILE.read_text())}
"""The hub id of each shape, by the shape's name: the last part of the id in small letters."""


def preset_config(name: str) -> dict[str, Any]:
    """Return the content of config.json for the shape of that name."""
    config: dict[str, Any] = json.loads(_FILE.read_text())[PRESETS[name]]
    return config


def find_shape(model: str, load_format: str) -> dict[str, Any] | None:
    """Return the content of config.json for the name of a shape; None if `model` is no such name.

    Raises:
        ValueError: load_format is not "dummy", and a shape has no weights.
    """
    name = model.lower()
    if name not in PRESETS:
        return None
    if load_format != "dummy":
        raise ValueError(
            f'model {model!r} is the name of a shape, without weights: use load_format="dummy" for random ones, '
            f'or the id "{PRESETS[name]}"'
        )
    return preset_config(name)
