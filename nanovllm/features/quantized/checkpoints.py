"""The formats of quantised checkpoints: which one a model has, and how its tensors become codes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.formats import INT8_DYNAMIC, MADE_AT_LOAD, W8A8, Format, RawTensors
from nanovllm.features.quantized.unpack import AWQ_ORDER, Floats4, ScaledFloats, make_codes, unpack_words
from nanovllm.models.model_folder import SETTINGS_FILE
from nanovllm.utils.checks import as_integer, quote
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Config = Mapping[str, Any]
"""The quantization_config of a config.json."""

SCALE_DTYPES = ("F32", "F16", "BF16")
INTEGERS = ("I32", "I64")

ORDERED = ("group", "dynamic", True)
UNORDERED = ("weight", "static", False, None)
"""compressed-tensors' spellings of actorder: with the first ones a checkpoint has weight_g_idx."""


@dataclass(frozen=True)
class Awq(Format):
    """AWQ's "gemm" (Lin et al. 2023, https://arxiv.org/abs/2306.00978)."""

    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    def list_tensors(self, prefix: str, names: Collection[str], out: int, size: int) -> RawTensors:
        if out % 8:
            raise ValueError(f"{prefix}: AWQ packs 8 outputs in a word, and {out} is not a multiple of 8")
        groups = self.count_groups(size)
        return {
            "qweight": ((size, out // 8), ("I32",)),
            "qzeros": ((groups, out // 8), ("I32",)),
            "scales": ((groups, out), SCALE_DTYPES),
        }

    def convert(self, tensors: Mapping[str, Tensor], out: int, size: int) -> Codes:
        numbers = unpack_words(tensors["qweight"], 4, AWQ_ORDER).T
        zeros = unpack_words(tensors["qzeros"], 4, AWQ_ORDER).T.contiguous()
        return make_codes(numbers, tensors["scales"].T.contiguous(), zeros, 4, self.group_size or size)


@dataclass(frozen=True)
class Gptq(Format):
    """GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323), as auto-gptq and gptqmodel save it.

    Attributes:
        is_v1: whether the words of zeros had one subtracted from each zero when they were packed, borrows and all:
            checkpoint_format "gptq", not "gptq_v2".
    """

    is_v1: bool = True

    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")

    def list_tensors(self, prefix: str, names: Collection[str], out: int, size: int) -> RawTensors:
        per_word = 32 // self.bits
        if out % per_word or size % per_word:
            raise ValueError(f"{prefix}: GPTQ packs {per_word} numbers in a word; {out} x {size} cannot be packed")
        groups = self.count_groups(size)
        tensors: RawTensors = {
            "qweight": ((size // per_word, out), ("I32",)),
            "qzeros": ((groups, out // per_word), ("I32",)),
            "scales": ((groups, out), SCALE_DTYPES),
        }
        if f"{prefix}.g_idx" in names:
            tensors["g_idx"] = ((size,), INTEGERS)
        return tensors

    def convert(self, tensors: Mapping[str, Tensor], out: int, size: int) -> Codes:
        bits = self.bits
        # The weights are packed along the inputs, the zeros along the outputs.
        numbers = unpack_words(tensors["qweight"].T.contiguous(), bits)
        ones = sum(1 << i for i in range(0, 32, bits)) if self.is_v1 else 0
        zeros = unpack_words(tensors["qzeros"] + ones, bits).T.contiguous()  # wraps around, as the subtraction did
        scales = tensors["scales"].T.contiguous()
        return make_codes(numbers, scales, zeros, bits, self.group_size or size, tensors.get("g_idx"))


@dataclass(frozen=True)
class PackQuantized(Format):
    """compressed-tensors' pack-quantized."""

    has_order: bool = False

    suffixes: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_shape")

    def list_tensors(self, prefix: str, names: Collection[str], out: int, size: int) -> RawTensors:
        if self.bits == 4 and size % 2:
            raise ValueError(f"{prefix}: rows of {size} weights of 4 bits are not supported: the number must be even")
        per_word = 32 // self.bits
        groups = self.count_groups(size)
        tensors: RawTensors = {
            "weight_packed": ((out, ceil_div(size, per_word)), ("I32",)),
            "weight_scale": ((out, groups), SCALE_DTYPES),
            "weight_shape": ((2,), INTEGERS),
        }
        if self.has_zeros:
            tensors["weight_zero_point"] = ((ceil_div(out, per_word), groups), ("I32",))
        if self.has_order:
            tensors["weight_g_idx"] = ((size,), INTEGERS)
        return tensors

    def convert(self, tensors: Mapping[str, Tensor], out: int, size: int) -> Codes:
        if (stated := tensors["weight_shape"].tolist()) != [out, size]:
            raise ValueError(f"weight_shape is {stated}; config.json asks for {[out, size]}")
        numbers = unpack_words(tensors["weight_packed"], self.bits)[:, :size]
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = unpack_words(zeros.T.contiguous(), self.bits).T[:out].contiguous()
        groups = tensors.get("weight_g_idx")
        return make_codes(numbers, tensors["weight_scale"], zeros, self.bits, self.group_size or size, groups)


@dataclass(frozen=True)
class IntQuantized(Format):
    """compressed-tensors' int-quantized: int8. No scale of activations is read.

    Attributes:
        has_input_scales: whether the checkpoint has scales of activations, the same for all tokens.
        has_one_scale: whether the checkpoint has one scale for a matrix. In memory each row has it.
    """

    has_input_scales: bool = False
    has_one_scale: bool = False

    suffixes: ClassVar[tuple[str, ...]] = ("weight_scale", "weight_zero_point")

    def list_tensors(self, prefix: str, names: Collection[str], out: int, size: int) -> RawTensors:
        shape = (1,) if self.has_one_scale else (out, self.count_groups(size))
        tensors: RawTensors = {"weight": ((out, size), ("I8",)), "weight_scale": (shape, SCALE_DTYPES)}
        if self.has_zeros:
            tensors["weight_zero_point"] = (shape, ("I8",))
        return tensors

    def convert(self, tensors: Mapping[str, Tensor], out: int, size: int) -> Codes:
        groups = self.count_groups(size)
        scales = tensors["weight_scale"].to(torch.float32).expand(out, groups)
        zeros = tensors.get("weight_zero_point")
        zeros = None if zeros is None else zeros.to(torch.int16).expand(out, groups)
        return Codes(8, tensors["weight"], scales, zeros, self.group_size or size)


@dataclass(frozen=True)
class ScaledFloat8(Format):
    """FP8 with scales for blocks, rows or whole matrices. The weights are kept with 16 bits.

    Attributes:
        block: rows and columns that share a scale; 0 stands for all of them.
    """

    block: tuple[int, int] = (0, 0)

    suffixes: ClassVar[tuple[str, ...]] = ("weight_scale_inv", "weight_scale")
    """Both names are in use for the same factors."""

    def list_tensors(self, prefix: str, names: Collection[str], out: int, size: int) -> RawTensors:
        suffix = next(suffix for suffix in self.suffixes if f"{prefix}.{suffix}" in names)
        shape = self._shape_of_scales(out, size) if any(self.block) else (1,)
        tensors: RawTensors = {
            "weight": ((out, size), ("F8_E4M3",)),
            suffix: (shape, (*SCALE_DTYPES, "F8_E8M0")),
        }
        if f"{prefix}.input_scale" in names:  # of activations, which are not quantised here
            tensors["input_scale"] = ((1,), SCALE_DTYPES)
        return tensors

    def convert(self, tensors: Mapping[str, Tensor], out: int, size: int) -> ScaledFloats:
        block = (self.block[0] or out, self.block[1] or size)
        scales = next(tensors[suffix] for suffix in self.suffixes if suffix in tensors)
        scales = scales.reshape(self._shape_of_scales(out, size)).to(torch.float32)
        return ScaledFloats(tensors["weight"], scales, block)

    def _shape_of_scales(self, out: int, size: int) -> tuple[int, int]:
        rows, columns = self.block
        return ceil_div(out, rows or out), ceil_div(size, columns or size)


@dataclass(frozen=True)
class Mxfp4(Format):
    """The experts of gpt-oss: floats of 4 bits, and a power of two for 32 of them. The weights are kept with 16 bits.

    Without the format, transformers would store the matrix [in, out] of each expert. The floats lie output by output.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("blocks", "scales")
    joint: ClassVar[str] = "_"
    stored_bits: ClassVar[int] = 4

    def find_tensors(self, prefix: str, names: Collection[str], *shape: int) -> RawTensors:
        if len(shape) != 3 or f"{prefix}_blocks" not in names:
            return {}
        num_experts, size, out = shape
        if size % 32:
            raise ValueError(f"{prefix}: MXFP4 has a scale for 32 inputs, and {size} is not a multiple of 32")
        rows = (num_experts, out, size // 32)
        return {"blocks": ((*rows, 16), ("U8",)), "scales": (rows, ("U8",))}

    def convert(self, tensors: Mapping[str, Tensor], out: int, size: int) -> Floats4:
        return Floats4(tensors["blocks"], tensors["scales"])


def find_format(asked: str | None, hf_config: "PretrainedConfig") -> Format | None:
    """Return the format of a model's weights; None if they are not quantised.

    Args:
        asked: the option `quantization`.

    Raises:
        ValueError: the checkpoint has a format that is not read here, or another one than `asked`.
    """
    data = getattr(hf_config, "quantization_config", None)
    if not data:
        if asked is None:
            return None
        if asked in MADE_AT_LOAD:
            return MADE_AT_LOAD[asked]
        raise ValueError(
            f"quantization is {quote(asked)}, and the checkpoint's config.json has no quantization_config: leave the "
            'option out, or use quantization="int8"'
        )
    method = data.get("quant_method") if isinstance(data, Mapping) else None
    try:
        format = read_format(data)
    except ValueError as error:
        where = f"config.json: quantization_config of {quote(method)}"
        if isinstance(data, Mapping) and SETTINGS_FILE in data:
            where = f"the checkpoint is quantised, by {quote(method)}, and its settings are in {data[SETTINGS_FILE]}"
        raise ValueError(f"{where}: {error}") from None
    if asked in (None, method, format.name):
        return format
    if asked in (INT8_DYNAMIC.name, W8A8.name) and format.bits < 16:
        fits = format.bits == 8 and format.group_size is None and not format.has_zeros
        if asked == W8A8.name and fits:
            return replace(format, name=asked, input_scales=W8A8.input_scales)
        need = "it must have codes of 8 bits without zeros, and one scale a row"
        if asked == INT8_DYNAMIC.name:
            need = "int8-dynamic rounds weights while they are read"
        instead = ', or use "w8a8" on a GPU' if fits else ": then products are exact"
        raise ValueError(
            f"quantization is {quote(asked)}, and the checkpoint ({method}) has {describe_codes(format)}; {need}: "
            f"leave the option out{instead}"
        )
    if asked in MADE_AT_LOAD and format.bits == 16:
        input_scales = MADE_AT_LOAD[asked].input_scales
        return replace(format, name=asked, bits=8, quantizes_head=True, input_scales=input_scales)
    raise ValueError(
        f"quantization is {quote(asked)}, and the checkpoint is quantised already ({method}): leave the option out"
    )


def read_format(data: Any) -> Format:
    """Return the format that a quantization_config describes; ValueError if it is not read here."""
    method = data.get("quant_method") if isinstance(data, Mapping) else None
    instead = 'the original checkpoint with quantization="int8"'
    if not isinstance(method, str) or method not in _READERS:
        raise ValueError(f"this is not supported: use {instead}, or one quantised by {', '.join(_READERS)}")
    try:
        return _READERS[method](data)
    except ValueError as error:
        raise ValueError(f"{error}. {instead[0].upper()}{instead[1:]} would do instead") from None


def describe_codes(format: Format) -> str:
    """Return what a checkpoint's codes are, for an error: "codes of 4 bits, in groups of 128, with zeros"."""
    groups = "one scale a row" if format.group_size is None else f"in groups of {format.group_size}"
    return f"codes of {format.bits} bits, {groups}{', with zeros' if format.has_zeros else ''}"


def describe_format(format: Format, dtype: str) -> str:
    """Return how the weights are stored, for a table: "int8", "4 bits (awq, groups of 128)", "bfloat16, from fp8".

    Args:
        dtype: the dtype of what is not quantised.
    """
    if format.bits == 16:
        return f"{dtype}, from {format.name} with {format.stored_bits} bits"
    if format.quantizes_head:
        return format.name
    groups = "rows" if format.group_size is None else f"groups of {format.group_size}"
    return f"{format.bits} bits ({format.name}, {groups}), embeddings in {dtype}"


def _check(data: Config, name: str, default: Any, accepted: Collection[Any]) -> Any:
    """Return an entry of a quantization_config; ValueError if it is not one of the accepted values."""
    value = data.get(name, default)
    if not any(value == one and isinstance(value, type(one)) for one in accepted):
        raise ValueError(f"{name} is {quote(value)}; supported are {', '.join(map(quote, accepted))}")
    return value


def _read_mapping(data: Config, name: str) -> Config:
    """Return an entry that is a JSON object; {} if it is missing or null."""
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {quote(value)}; it must be an object")
    return value


def _read_group_size(data: Config) -> int | None:
    """Return group_size; None for whole rows, which configurations write as -1 or null.

    AWQ's first files call it q_group_size.
    """
    value = data.get("group_size", data.get("q_group_size"))
    return None if value in (None, -1) else as_integer(value, "group_size", 8)


def _read_awq(data: Config) -> Format:
    _check(data, "w_bit" if "w_bit" in data else "bits", 4, (4,))  # w_bit in its first files
    if str(version := data.get("version", "gemm")).lower() != "gemm":
        raise ValueError(f"version is {quote(version)}; supported is 'gemm'")
    return Awq("awq", bits=4, group_size=_read_group_size(data), has_zeros=True)


def _read_gptq(data: Config) -> Format:
    bits = _check(data, "bits", None, (4, 8))
    layout = _check(data, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    _check(data, "pack_dtype", "int32", ("int32",))
    _check(data, "is_marlin_format", False, (False,))
    dynamic = _read_mapping(data, "dynamic")
    # An entry that begins with "-:" names modules that are not quantised. The tensors' names say so, too.
    if overrides := sorted(key for key in dynamic if not key.startswith("-:")):
        raise ValueError(f"dynamic has {quote(overrides[0])}: layers with settings of their own are not supported")
    has_zeros = not data.get("sym", True)
    return Gptq("gptq", bits, _read_group_size(data), has_zeros=has_zeros, is_v1=layout == "gptq")


def _read_fp8(data: Config) -> Format:
    _check(data, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    return ScaledFloat8("fp8", bits=16, block=_read_block(data.get("weight_block_size")))


def _read_modelopt(data: Config) -> Format:
    _check(_read_mapping(data, "quantization") or data, "quant_algo", None, ("FP8",))
    return ScaledFloat8("fp8", bits=16)


def _read_mxfp4(_: Config) -> Format:
    return Mxfp4("mxfp4", bits=16)  # the tensors' names say which matrices are quantised


def _read_block(block: Any) -> tuple[int, int]:
    """Return the rows and columns that share a scale; (0, 0) if all do."""
    if block is None:
        return 0, 0
    if not isinstance(block, list) or len(block) != 2:
        raise ValueError(f"the size of a block is {quote(block)}; it must be a list of two integers")
    rows, columns = (as_integer(size, "the size of a block", 1) for size in block)
    return rows, columns


def _read_compressed(data: Config) -> Format:
    if data.get("transform_config"):
        raise ValueError("transform_config is not supported")
    if _read_mapping(data, "sparsity_config").get("format", "dense") != "dense":
        raise ValueError("sparsity_config is not supported")
    groups = list(_read_mapping(data, "config_groups").values())
    schemes = [group.get("weights") if isinstance(group, Mapping) else None for group in groups]
    if not schemes or any(scheme != schemes[0] or not isinstance(scheme, Mapping) for scheme in schemes):
        raise ValueError("config_groups must have weights, and the same in all groups")
    scheme: Config = groups[0]["weights"]
    layouts = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    layout = _check({"format": groups[0].get("format") or data.get("format")}, "format", None, layouts)
    kind = _check(scheme, "type", "int", ("int", "float"))
    strategy = scheme.get("strategy") or ("channel" if scheme.get("group_size") is None else "group")
    if kind == "float":
        _check(scheme, "num_bits", None, (8,))
        _check({"format": layout}, "format", None, ("float-quantized", "naive-quantized"))
        _check({"strategy": strategy}, "strategy", None, ("tensor", "channel", "block"))
        block = {"tensor": (0, 0), "channel": (1, 0), "block": _read_block(scheme.get("block_structure"))}[strategy]
        return ScaledFloat8("compressed-tensors", bits=16, block=block)
    is_packed = layout == "pack-quantized"
    strategies = ("channel", "group") if is_packed else ("tensor", "channel", "group")
    _check({"strategy": strategy}, "strategy", None, strategies)
    size = _read_group_size(scheme) if strategy == "group" else None
    has_zeros = not scheme.get("symmetric", True)
    if is_packed:
        bits = _check(scheme, "num_bits", None, (4, 8))
        has_order = _check(scheme, "actorder", None, (*ORDERED, *UNORDERED)) in ORDERED
        return PackQuantized("compressed-tensors", bits, size, has_zeros, has_order=has_order)
    _check(scheme, "num_bits", None, (8,))
    inputs = _read_mapping(groups[0], "input_activations")
    return IntQuantized(
        *("compressed-tensors", 8, size, has_zeros),
        has_input_scales=bool(inputs) and not inputs.get("dynamic"),
        has_one_scale=strategy == "tensor",
    )


_READERS: Mapping[Any, Callable[[Config], Format]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
"""By quant_method."""
