"""A model in GGUF, in the place of a model's folder: what the engine asks of a folder's files, a GGUF file says."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from nanovllm.engine.pooling import Pooling
from nanovllm.features.gguf.format import star_expert
from nanovllm.features.gguf.metadata import find_architecture, read_config, read_generation
from nanovllm.features.gguf.reader import GgufFile
from nanovllm.features.gguf.tensors import CODED, FLOATS, Named, TensorFile, name_tensors
from nanovllm.features.gguf.tokenizer import build_tokenizer
from nanovllm.models.model_folder import ModelFolder
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import INT64_MAX, quote

POOLINGS = {
    0: Pooling(),
    1: Pooling(mode="mean"),
    2: Pooling(mode="first"),
    3: Pooling(),
    4: Pooling(refusal="this model ranks texts (pooling_type 4 of its GGUF file), and makes no vectors"),
}
"""{pooling_type of an architecture: how vectors are made}, as llama.cpp numbers them."""


class GgufModel(ModelFolder):
    """A model in GGUF. `path` is the file, or the first of several."""

    @cached_property
    def file(self) -> GgufFile:
        """The headers of all files."""
        return GgufFile(self.path)

    @property
    def source(self) -> str:
        return str(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content that a config.json would have. Its quantization_config has the type of each coded matrix."""
        config = read_config(self.file)
        names = name_tensors(self.file, find_architecture(self.file)[1], config)
        types = {star_expert(name).rpartition(".")[0]: one.place.type_name for name, one in names.items()}
        coded = {name: kind for name, kind in types.items() if kind in CODED}
        widened: dict[str, tuple[int, int]] = {}
        for place in self.file.tensors.values():
            if place.type_name not in CODED and place.type_name not in FLOATS:
                weights, num_bytes = widened.get(place.type_name, (0, 0))
                widened[place.type_name] = (weights + math.prod(place.shape), num_bytes + place.num_bytes)
        num_bytes = sum(place.num_bytes for place in self.file.tensors.values())
        own = {"quant_method": "gguf", "types": coded, "num_bytes": num_bytes, "widened": widened}
        return config | {"quantization_config": own}

    def find_settings(self) -> None:
        return None

    generation_source = source

    @cached_property
    def generation(self) -> dict[str, Any]:
        return read_generation(self.file.metadata)

    @property
    def index(self) -> set[str]:
        return set()

    @property
    def files(self) -> list[Path]:
        return self.file.files

    @cached_property
    def tensors(self) -> dict[str, Named]:
        """{transformers' name of a tensor: where it is}."""
        return name_tensors(self.file, find_architecture(self.file)[1], self.config)

    @property
    def places(self) -> dict[str, Path]:
        return {name: one.place.file for name, one in self.tensors.items()}

    @contextmanager
    def open_tensors(self, path: Path) -> Iterator[TensorFile]:
        yield TensorFile(path, self.tensors)

    @property
    def pooling(self) -> Pooling:
        name, _ = find_architecture(self.file)
        kind = self.file.metadata.get(f"{name}.pooling_type", 0)
        unknown = Pooling(refusal=f"{self.path}: pooling_type is {quote(kind)}, which is not known")
        return POOLINGS.get(kind, unknown) if isinstance(kind, int) else unknown

    def read_tokenizer(self, max_model_len: int = INT64_MAX) -> Tokenizer | None:
        return build_tokenizer(self.file.metadata, str(self.path), max_model_len)
