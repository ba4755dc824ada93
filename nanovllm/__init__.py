"""nano-vLLM: offline batch inference of Qwen3 models, small enough to read in an afternoon."""

from nanovllm.version import __version__

__all__ = ["__version__"]
