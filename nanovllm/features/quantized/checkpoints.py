"""The formats of quantised checkpoints: which one a model has, and how its tensors become codes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.formats import INT8_DYNAMIC, MADE_AT_LOAD, W8A8, Format, RawTensors
from nanovllm.features.quantized.unpack import AWQ_ORDER, Floats4, ScaledFloats, make_codes, unpack
from nanovllm.models.model_folder import SETTINGS_FILE
from nanovllm.utils.checks import as_integer, quote
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Config = Mapping[str, Any]
"""The quantization_config of a config.json."""

WORDS = ("I32",)
INTEGERS = ("I32", "I64")
SCALES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Stored:
    """One of the tensors that make a matrix [out, in] in a checkpoint.

    Attributes:
        role: what it has: "codes", "scales", "zeros", "columns" (the group of each), "shape", or "unused" numbers.
        axes: its shape: "out in", say. See `TableFormat.measure` for other names. "out*" is an axis of words, of which
            each has several outputs, and "1" and "2" are sizes.
        dtypes: the number formats that it may have.
        is_optional: whether a checkpoint may lack it.
    """

    role: str
    axes: str
    dtypes: tuple[str, ...]
    is_optional: bool = False


Table = Mapping[str, Stored]
"""{suffix of a tensor's name: how it is stored}, of all tensors that make a matrix. The first of a role counts."""

AWQ: Table = {
    "qweight": Stored("codes", "in out*", WORDS),
    "qzeros": Stored("zeros", "groups out*", WORDS),
    "scales": Stored("scales", "groups out", SCALES),
}
"""AWQ's "gemm" (Lin et al. 2023, https://arxiv.org/abs/2306.00978)."""

GPTQ: Table = {
    "qweight": Stored("codes", "in* out", WORDS),
    "qzeros": Stored("zeros", "groups out*", WORDS),
    "scales": Stored("scales", "groups out", SCALES),
    "g_idx": Stored("columns", "in", INTEGERS, is_optional=True),
}
"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323), as auto-gptq and gptqmodel save it."""

PACKED: Table = {
    "weight_packed": Stored("codes", "out in*", WORDS),
    "weight_scale": Stored("scales", "out groups", SCALES),
    "weight_shape": Stored("shape", "2", INTEGERS),
    "weight_zero_point": Stored("zeros", "out* groups", WORDS),
    "weight_g_idx": Stored("columns", "in", INTEGERS),
}
"""compressed-tensors' pack-quantized, with all that it may have."""

BYTES: Table = {
    "weight": Stored("codes", "out in", ("I8",)),
    "weight_scale": Stored("scales", "out groups", SCALES),
    "weight_zero_point": Stored("zeros", "out groups", ("I8",)),
}
"""compressed-tensors' int-quantized, with all that it may have. No scale of activations is read."""

FLOAT8: Table = {
    "weight": Stored("codes", "out in", ("F8_E4M3",)),
    "weight_scale_inv": Stored("scales", "rows columns", (*SCALES, "F8_E8M0"), is_optional=True),
    "weight_scale": Stored("scales", "rows columns", (*SCALES, "F8_E8M0"), is_optional=True),
    "input_scale": Stored("unused", "1", SCALES, is_optional=True),
}
"""FP8. Two names are in use for the same scales. Activations, which have one, too, are not quantised here."""

ORDERED = ("group", "dynamic", True)
UNORDERED = ("weight", "static", False, None)
"""compressed-tensors' spellings of actorder: with the first ones a checkpoint has weight_g_idx."""


def leave_out(table: Table, *roles: str) -> Table:
    """Return a table without the tensors of some roles."""
    return {suffix: stored for suffix, stored in table.items() if stored.role not in roles}


def share_scale(table: Table) -> Table:
    """Return a table with one scale for a whole matrix, and one zero."""
    shared = ("scales", "zeros")
    return {suffix: replace(own, axes="1") if own.role in shared else own for suffix, own in table.items()}


@dataclass(frozen=True)
class TableFormat(Format):
    """A format whose matrices are several tensors each.

    Attributes:
        table: says which ones.
        block: rows and columns that share a scale, where axes are blocks; 0 stands for all of them.
    """

    table: Table = field(default_factory=dict)
    block: tuple[int, int] = (0, 0)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of names of which each shows that a matrix is quantised."""
        return tuple(suffix for suffix, own in self.table.items() if suffix != "weight" and own.role != "unused")

    def measure(self, out: int, size: int) -> dict[str, int]:
        """Return the length of each axis that the table may name, of a matrix [out, size]."""
        rows, columns = self.block
        per_word = 32 // self.bits
        words = {"out*": ceil_div(out, per_word), "in*": ceil_div(size, per_word)}
        blocks = {"rows": ceil_div(out, rows or out), "columns": ceil_div(size, columns or size)}
        return {"out": out, "in": size, "groups": self.count_groups(size), "1": 1, "2": 2, **words, **blocks}

    def find_tensors(self, prefix: str, names: Collection[str], *shape: int) -> RawTensors:
        if len(shape) != 2 or not any(f"{prefix}.{suffix}" in names for suffix in self.suffixes):
            return {}
        return self.list_tensors(prefix, names, *shape)

    def list_tensors(self, prefix: str, names: Collection[str], out: int, size: int) -> RawTensors:
        """Return the tensors that make a quantised matrix."""
        if self.bits == 4 and size % 2:
            raise ValueError(f"{prefix}: rows of {size} weights of 4 bits are not supported: the number must be even")
        sizes = self.measure(out, size)
        found: RawTensors = {}
        roles = set()
        for suffix, own in self.table.items():
            is_there = not own.is_optional or f"{prefix}.{suffix}" in names
            if is_there and own.role not in roles:
                found[suffix] = (tuple(sizes[axis] for axis in own.axes.split()), own.dtypes)
                roles.add(own.role)
        return found


@dataclass(frozen=True)
class CodeFormat(TableFormat):
    """A format that has codes, scales, and perhaps zeros.

    Attributes:
        word_order: see `unpack`.
        plus: is added to each word of zeros. GPTQ's first layout stores zeros less one, borrows and all.
        has_input_scales: whether the checkpoint has scales of activations, the same for all tokens.
    """

    word_order: tuple[int, ...] | None = None
    plus: int = 0
    has_input_scales: bool = False

    def convert(self, tensors: Mapping[str, Tensor], out: int, size: int) -> Codes:
        sizes = self.measure(out, size)
        found: dict[str, Tensor] = {}
        for suffix, tensor in tensors.items():
            own = self.table[suffix]
            words = tensor + self.plus if own.role == "zeros" else tensor  # the sum wraps around
            found[own.role] = unpack(words, own.axes, sizes, self.bits, self.word_order)
        if "shape" in found and (stated := found["shape"].tolist()) != [out, size]:
            raise ValueError(f"weight_shape is {stated}; config.json asks for {[out, size]}")
        shape = (out, sizes["groups"])
        scales = found["scales"].expand(shape)
        zeros = found["zeros"].expand(shape) if "zeros" in found else None
        return make_codes(found["codes"], scales, zeros, self.bits, self.group_size or size, found.get("columns"))


@dataclass(frozen=True)
class ScaledFloat8(TableFormat):
    """FP8 with scales for blocks, rows or whole matrices. The weights are kept with 16 bits."""

    def convert(self, tensors: Mapping[str, Tensor], out: int, size: int) -> ScaledFloats:
        sizes = self.measure(out, size)
        scales = next(tensor for suffix, tensor in tensors.items() if self.table[suffix].role == "scales")
        scales = scales.reshape(sizes["rows"], sizes["columns"])
        return ScaledFloats(tensors["weight"], scales, (self.block[0] or out, self.block[1] or size))


@dataclass(frozen=True)
class Mxfp4(Format):
    """The experts of gpt-oss: floats of 4 bits, and a power of two for 32 of them. The weights are kept with 16 bits.

    Without the format, transformers would store the matrix [in, out] of each expert. The floats lie output by output.
    """

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
        fits_w8a8 = format.bits == 8 and format.group_size is None and not format.has_zeros
        if asked == W8A8.name and fits_w8a8:
            return replace(format, name=asked, input_scales=W8A8.input_scales)
        need = "it must have codes of 8 bits without zeros, and one scale a row"
        if asked == INT8_DYNAMIC.name:
            need = "int8-dynamic rounds weights while they are read"
        instead = ', or use "w8a8" on a GPU' if fits_w8a8 else ": then products are exact"
        raise ValueError(
            f"quantization is {quote(asked)}, and the checkpoint ({method}) has {describe_codes(format)}; {need}: "
            f"leave the option out{instead}"
        )
    if asked in MADE_AT_LOAD and format.bits == 16:
        input_scales = MADE_AT_LOAD[asked].input_scales
        return replace(format, name=asked, bits=8, rounds=True, quantizes_head=True, input_scales=input_scales)
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
    return CodeFormat("awq", 4, _read_group_size(data), has_zeros=True, table=AWQ, word_order=AWQ_ORDER)


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
    plus = sum(1 << i for i in range(0, 32, bits)) if layout == "gptq" else 0
    return CodeFormat("gptq", bits, _read_group_size(data), has_zeros, table=GPTQ, plus=plus)


def _read_fp8(data: Config) -> Format:
    _check(data, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    return make_float8("fp8", _read_block(data.get("weight_block_size")))


def _read_modelopt(data: Config) -> Format:
    _check(_read_mapping(data, "quantization") or data, "quant_algo", None, ("FP8",))
    return make_float8("fp8", (0, 0))


def make_float8(name: str, block: tuple[int, int]) -> ScaledFloat8:
    """Return the format of FP8 whose scales belong to blocks of this size."""
    return ScaledFloat8(name, bits=16, table=FLOAT8 if any(block) else share_scale(FLOAT8), block=block)


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
        return make_float8("compressed-tensors", block)
    is_packed = layout == "pack-quantized"
    strategies = ("channel", "group") if is_packed else ("tensor", "channel", "group")
    _check({"strategy": strategy}, "strategy", None, strategies)
    size = _read_group_size(scheme) if strategy == "group" else None
    has_zeros = not scheme.get("symmetric", True)
    table = PACKED if is_packed else BYTES
    if not has_zeros:
        table = leave_out(table, "zeros")
    if is_packed:
        bits = _check(scheme, "num_bits", None, (4, 8))
        if _check(scheme, "actorder", None, (*ORDERED, *UNORDERED)) in UNORDERED:
            table = leave_out(table, "columns")
        return CodeFormat("compressed-tensors", bits, size, has_zeros, table=table)
    _check(scheme, "num_bits", None, (8,))
    inputs = _read_mapping(groups[0], "input_activations")
    return CodeFormat(
        *("compressed-tensors", 8, size, has_zeros),
        table=share_scale(table) if strategy == "tensor" else table,
        has_input_scales=bool(inputs) and not inputs.get("dynamic"),
    )


def _read_gguf(data: Config) -> Format:
    from nanovllm.features.gguf.format import read_format

    if "types" not in data:
        raise ValueError("a GGUF file has this format, and no folder")
    return read_format(data)


_READERS: Mapping[Any, Callable[[Config], Format]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
    "gguf": _read_gguf,
}
"""By quant_method."""
