"""Folders that tests name."""

from pathlib import Path

import nanovllm

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
BOX_MODEL = Path(nanovllm.__file__).parent / "assets" / "tiny-qwen3"
"""The folder of the built-in model."""
