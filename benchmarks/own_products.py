"""Makes an engine multiply few rows by its own kernel, backends/gpu/few_rows.py, or by cuBLAS alone.

By itself an engine takes the kernel where a GPU has shown that it is faster: backends/gpu/few_rows_layer.py says where.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import nn

from nanovllm.backends.gpu.few_rows_layer import use_few_rows
from nanovllm.backends.gpu.triton_backend import TritonBackend, TritonKernels

MOST_BYTES = {"own": sys.maxsize, "torch": -1}
"""The largest matrix of a layer that takes the kernel, by the name of a choice."""


@contextmanager
def choose_products(name: str) -> Iterator[None]:
    """Within, an engine on the Triton backend that is made in this process does what is chosen, and goes on doing it.

    Args:
        name: "own" for the kernel in all plain layers, "torch" for cuBLAS in all layers.
    """

    usual = TritonKernels.pack_weights

    def pack_weights(backend: TritonKernels, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        usual(backend, modules)
        use_few_rows(modules, MOST_BYTES[name])

    with (
        mock.patch.object(TritonKernels, "pack_weights", pack_weights),
        mock.patch.object(TritonBackend, "pack_weights", pack_weights),
    ):
        yield
