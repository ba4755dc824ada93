"""Counts the parameters and the memory of a model, or of one rank's share of it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.backends import Backend, CacheSize
from nanovllm.models.decoder import find_decoder
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import Quantizer
from nanovllm.ops.attention import AttentionVariant
from nanovllm.utils.machine import default_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanovllm.models.decoder import Decoder


def read_dtype(hf_config: "PretrainedConfig") -> torch.dtype:
    """Return the dtype that the model's config.json names, or float32 if it names none."""
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


class Sizes:
    """The sizes of a model, or of one rank's share. They are counted on torch's meta device, which has no memory.

    Attributes:
        model: the decoder. Its tensors have shapes, but no values.
        backend: the model's. A layer may pad its heads to the `head_dims` of a backend.
        num_parameters: the number of its parameters. What is tied counts once, and padding counts.
    """

    def __init__(self, config: "PretrainedConfig", size: int = 1, decoder: "type[Decoder] | None" = None) -> None:
        """
        Args:
            size: how many ranks share each layer.
            decoder: the class of the model, or of a part of it. None: what `find_decoder` finds.

        Raises:
            ValueError: so many ranks cannot share the model evenly.
        """
        self.backend = Backend()
        with torch.device("meta"), default_dtype(read_dtype(config)):
            self.model = (decoder or find_decoder(config))(config, self.backend, Parallel(0, size))
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def weight_bytes(self, dtype: torch.dtype, quantizer: Quantizer | None = None) -> int:
        """Return the memory of the weights. `dtype` is the type of those that are not quantised."""
        if quantizer is not None:
            return quantizer.count_bytes(self.model, dtype.itemsize)
        return self.num_parameters * dtype.itemsize

    def kv_bytes(self, kv_dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in all layers, with their scales if they have some."""
        return self._cache_bytes(CacheSize(num_blocks=1, block_size=1, num_rows=0, kv_dtype=kv_dtype), kv_dtype)

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the state of one row, in all layers; 0 for most families."""
        return self._cache_bytes(CacheSize(num_blocks=0, block_size=1, num_rows=1, kv_dtype=dtype), dtype)

    def find_variants(self) -> list[AttentionVariant]:
        """Return the variants of all layers whose attention is a variant."""
        layers: Iterable[Any] = self.model.layers
        variants = (getattr(layer.self_attn, "variant", None) for layer in layers)  # a layer with a state has none
        return [variant for variant in variants if variant is not None]

    def list_variants(self) -> tuple[str, ...]:
        """Return the fields of `AttentionVariant` that layers of the model set."""
        variants = self.find_variants()
        fields = AttentionVariant._fields
        return tuple(name for name in fields if any(getattr(variant, name) is not None for variant in variants))

    def _cache_bytes(self, size: CacheSize, dtype: torch.dtype) -> int:
        layers: Iterable[Any] = self.model.layers
        caches = (layer.self_attn.make_cache(size, dtype, torch.device("meta")) for layer in layers)
        return sum(tensor.nbytes for cache in caches for tensor in cache if tensor is not None)
