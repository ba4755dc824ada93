"""The shapes of published models, by name: with load_format="dummy" they need no download."""

import json
from pathlib import Path
from typing import Any

# By id: of each one's config.json all that decides the shapes, or what is computed.
_CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent.parent / "assets" / "presets.json").read_text())

PRESETS = {model.rpartition("/")[2].lower(): model for model in _CONFIGS}
"""The hub's id of each shape, by its name, which is the id's last part in small letters."""


def preset_config(name: str) -> dict[str, Any]:
    """The config.json of the preset, as a dict."""
    return dict(_CONFIGS[PRESETS[name]])
