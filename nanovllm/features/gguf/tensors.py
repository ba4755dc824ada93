"""The tensors of a GGUF file under transformers' names, as the loader reads them from safetensors: a part at a time."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.features.gguf.blocks import BLOCK_TYPES
from nanovllm.features.gguf.metadata import DIVISORS, LONG_FACTORS, SHORT_FACTORS, Architecture
from nanovllm.features.gguf.reader import GgufFile, Place, import_gguf
from nanovllm.features.quantized.codes import ELEMENTS_AT_A_TIME
from nanovllm.models.config_sizes import MOST
from nanovllm.utils.checks import quote

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of numbers that torch has."""
CODED = frozenset(BLOCK_TYPES)
"""The types that become codes."""
TABLES = {DIVISORS: "divisors", LONG_FACTORS: "long_factor", SHORT_FACTORS: "short_factor"}
"""{a tensor: the rope parameter that has its numbers}."""
LAYER = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")


class Named(NamedTuple):
    """A tensor, or the matrix of one expert of it. Ranks get it, so it holds plain values.

    Attributes:
        num_pairs: the heads whose rows are in pairs; 0 if the rows are in transformers' order.
        plus: is added to the numbers.
        expert: the number of an expert; None for a whole tensor.
    """

    place: Place
    num_pairs: int = 0
    plus: float = 0.0
    expert: int | None = None


def name_tensors(file: GgufFile, architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Named]:
    """Return {transformers' name: where it is} of all tensors of a file.

    A matrix that becomes codes has the name of its type in the place of "weight": see `GgufFormat`.

    Raises:
        ValueError: the file has a tensor that is not read here, or one of a type that nobody reads.
    """
    gguf = import_gguf()
    found: dict[str, Named] = {}
    for name, place in file.tensors.items():
        what = f"{file.path}: tensor {quote(name)}"
        if TABLES.get(name) in config["rope_parameters"]:
            continue
        if place.type_name not in FLOATS and gguf.GGMLQuantizationType[place.type_name] not in gguf.quants._type_traits:
            raise ValueError(f"{what} is of type {place.type_name}, which is not read here")
        match = LAYER.fullmatch(name)
        owner, _, kind = name.rpartition(".")
        own = architecture.layer.get(match[2]) if match else architecture.ends.get(owner)
        if own is None or kind not in ("weight", "bias"):
            raise ValueError(f"{what} is not read here; the model would say something else")
        path = f"model.layers.{int(match[1])}.{own}" if match else own
        if own.endswith("shared_expert_gate") and len(place.shape) == 1:  # llama.cpp drops a dimension of 1
            place = place._replace(shape=(1, *place.shape))
        experts: list[int | None] = [None]
        if "*" in path:
            count = config["num_experts"]
            if len(place.shape) != 3 or place.shape[0] != count or count > MOST["num_experts"]:
                raise ValueError(f"{what} has shape {list(place.shape)}; the metadata has {count} experts")
            experts = list(range(count))
        named = Named(place, count_pairs(architecture, match[2] if match else "", config, place))
        if architecture.has_folded_norms and owner.endswith("norm") and kind == "weight":
            named = named._replace(plus=-1.0)
        end = place.type_name if place.type_name in CODED and len(place.shape) > 1 else kind
        for expert in experts:
            full = f"{path.replace('*', str(expert))}.{end}"
            if full in found:
                raise ValueError(f"{what} is there twice, under other names")
            found[full] = named._replace(expert=expert)
    return found


def count_pairs(architecture: Architecture, name: str, config: Mapping[str, Any], place: Place) -> int:
    """Return the number of heads of queries or keys whose rows are in pairs; 0 for other tensors."""
    if not architecture.has_pairs or name not in ("attn_q", "attn_k"):
        return 0
    heads: int = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
    rows = place.shape[0]
    if not heads or rows % (2 * heads):
        raise ValueError(f"{place.file}: {name} has {rows} rows, which {heads} heads cannot share")
    return heads


def order_rows(num_rows: int, num_heads: int) -> Tensor:
    """Return the rows of queries or keys in transformers' order, int64 [rows].

    llama.cpp's llama rotates neighbours, and transformers the halves of a head: 0 1 2 3 becomes 0 2 1 3.
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def dequantize(blocks: Tensor, place: Place) -> Tensor:
    """Return the numbers of blocks [..., bytes], float32 [..., in]. A few rows at a time are in memory twice."""
    gguf = import_gguf()
    kind = gguf.GGMLQuantizationType[place.type_name]
    rows = blocks.reshape(-1, blocks.shape[-1])
    found = torch.empty(len(rows), place.shape[-1])
    height = max(1, ELEMENTS_AT_A_TIME // place.shape[-1])
    for start in range(0, len(rows), height):
        part = slice(start, start + height)
        found[part] = torch.from_numpy(gguf.dequantize(rows[part].numpy(), kind))
    return found.view(*blocks.shape[:-1], -1)


class TensorFile:
    """One file of tensors, with the methods that safetensors' files have."""

    def __init__(self, path: Path, tensors: Mapping[str, Named]) -> None:
        self._tensors = {name: one for name, one in tensors.items() if one.place.file == path}
        end = max((one.place.offset + one.place.num_bytes for one in self._tensors.values()), default=0)
        # Mapped, as safetensors does it: what is read lies in the operating system's cache alone.
        try:
            self._data = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
        except RuntimeError as error:  # since its header was read, the file has become shorter, or is gone
            raise ValueError(f"{path} cannot be read: {error}") from error

    def keys(self) -> Iterator[str]:
        return iter(self._tensors)

    def get_slice(self, name: str) -> "StoredTensor":
        return StoredTensor(self._tensors[name], self._data)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, with the methods of safetensors' slices. Numbers, and the bytes of blocks, are read when it is sliced.

    A type that is neither codes nor of torch is dequantised then, row by row.
    """

    named: Named
    data: Tensor

    @property
    def _is_dequantised(self) -> bool:
        return self.named.place.type_name not in FLOATS and self.named.place.type_name not in CODED

    def get_dtype(self) -> str:
        """Return the type of the numbers as safetensors names it: "U8" for the bytes of blocks."""
        kind = self.named.place.type_name
        return kind if kind in FLOATS else "F32" if self._is_dequantised else "U8"

    def get_shape(self) -> list[int]:
        """Return the shape of what slicing gives: of blocks, their bytes in each row."""
        place = self.named.place
        shape = list(place.shape if self.named.expert is None else place.shape[1:])
        return shape if self.get_dtype() != "U8" else [shape[0], self._stored().shape[1]]

    def _stored(self) -> Tensor:
        """Return the numbers as they lie in the file; or the bytes of blocks, [rows, bytes]."""
        place = self.named.place
        stored = self.data[place.offset : place.offset + place.num_bytes]
        if place.type_name in FLOATS:
            stored = stored.view(FLOATS[place.type_name]).view(place.shape)
        else:
            stored = stored.view(*place.shape[:-1], -1)
        return stored if self.named.expert is None else stored[self.named.expert]

    def __getitem__(self, index: Any) -> Tensor:
        rows, *others = index if isinstance(index, tuple) else (index,)
        if rows is Ellipsis:
            rows = slice(None)
        stored = self._stored()
        pairs = self.named.num_pairs
        part = stored[order_rows(len(stored), pairs)[rows] if pairs else rows]
        if self._is_dequantised:
            part = dequantize(part, self.named.place)
        if self.named.plus:
            part = part.float() + self.named.plus
        return part[(..., *others)] if others else part
