"""Chooses the decoder of a family: most families share one, and differ in what `FAMILIES` says."""

from typing import TYPE_CHECKING

from nanovllm.backends import Backend
from nanovllm.layers.parallel import Parallel
from nanovllm.models.decoder import Decoder
from nanovllm.models.qwen3_5 import HybridDecoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DECODERS: dict[str, type[Decoder]] = {"Qwen3_5TextConfig": HybridDecoder}
"""By transformers' class of configuration, the decoders of families that have one of their own."""


def make_decoder(config: "PretrainedConfig", backend: Backend, parallel: Parallel, max_model_len: int) -> Decoder:
    """Return the model of one rank. Its parameters are uninitialised."""
    return DECODERS.get(type(config).__name__, Decoder)(config, backend, parallel, max_model_len)
