"""Fills a model with quantised matrices: each is quantised, or converted, as it is read."""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanovllm.backends import make_backend
from nanovllm.config import ResolvedConfig
from nanovllm.layers.embedding import LMHead, VocabParallelEmbedding
from nanovllm.layers.linear import MatrixModule
from nanovllm.layers.weights import NamedTargets, WeightTarget
from nanovllm.models.decoder import Decoder
from nanovllm.models.qwen3_moe.decoder import Experts, SparseMLP
from nanovllm.models.weight_names import find_module_targets
from nanovllm.models.weight_reader import materialize
from nanovllm.quantized.checkpoints import find_format
from nanovllm.quantized.codes import ELEMENTS_AT_A_TIME, Codes, quantize_int8
from nanovllm.quantized.formats import INT8, MADE_AT_LOAD, Format, RawTensors
from nanovllm.quantized.torch_matrix import MatrixOperators
from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

UNKNOWN = -1
"""The place of a column in an order that has not come."""

Copy = Callable[[Tensor, Tensor], object]


def can_round_inputs(config: ResolvedConfig) -> bool:
    """Return whether the backend that `config` names can multiply by rounded inputs."""
    try:
        return make_backend(config.attention_backend, config.device).rounds_inputs
    except ImportError:  # an estimate for a GPU: its kernels, which do not round, need not be installed here
        return False


class ModelQuantizer:
    """Gives one rank's model quantised matrices, which weight_reader.py, dummy_weights.py and renewal.py fill.

    The model is made on torch's meta device, so that no matrix is ever in memory with 16 bits for each weight.
    """

    def __init__(self, config: ResolvedConfig, hf_config: "PretrainedConfig") -> None:
        """ValueError if the checkpoint's format is not supported, or not the one that the option asks for."""
        format = find_format(config.quantization, hf_config)
        if format is None:
            raise ValueError("neither config.json nor the option quantization asks for quantised weights")
        if config.lora is not None and format not in MADE_AT_LOAD.values():
            raise ValueError(
                f"lora is {quote(config.lora)}, and the checkpoint is quantised already: an adapter can be merged only "
                'into a checkpoint of 16 or 32 bits; quantization="int8" quantises the merged weights'
            )
        if format.rounds_inputs and not can_round_inputs(config):
            raise ValueError(
                f"quantization is {quote(format.name)}, for which there are kernels on a CPU only: on a GPU use "
                'quantization="int8", or attention_backend="torch", which is slow'
            )
        self.format = format
        self._config = config
        self._device = torch.device(config.device)

    def count_bytes(self, model: Decoder, itemsize: int) -> int:
        """Return the memory of a model's weights, if those that are not quantised take `itemsize` bytes each."""
        return count_bytes(model, self.format, itemsize)

    def announce(self, model: Decoder) -> None:
        """Log what a user should know of the format. `model` is the whole one."""
        if self.format.bits == 16:
            dtype = self._config.dtype
            itemsize = getattr(torch, dtype).itemsize
            num_bytes = self.count_bytes(model, itemsize)
            int8_bytes = count_bytes(model, INT8, itemsize)
            logger.warning(
                "the checkpoint's FP8 weights become %s while they are read, and take %.2f GiB in all; "
                'quantization="int8" takes %.2f GiB',
                *(dtype, num_bytes / 2**30, int8_bytes / 2**30),
            )
            return
        if self.format.rounds_inputs and any(isinstance(module, Experts) for module in model.modules()):
            logger.info('the experts are multiplied as with quantization="int8": their inputs are not rounded')
        backend = make_backend(self._config.attention_backend, self._config.device)
        operators = backend.find_operators(MatrixOperators, "quantized")
        operators.warn(self.format)

    def list_matrices(self, model: Decoder) -> list[nn.Parameter]:
        return [value for module in find_matrices(model, self.format).values() for value in find_weights(module)]

    def begin(self, model: Decoder) -> "Filling":
        """Return what fills the matrices of a model once. Several may be begun, and not all need to be finished."""
        return Filling(self.format, model, self._device)

    def find_targets(self, model: Decoder, names: Collection[str]) -> NamedTargets:
        """Yield what `weight_names.find_targets` yields, with other targets where a matrix is quantised."""
        filling = self.begin(model)
        filling.allocate_others(names)
        for _, name, target in filling.find_targets(names):
            yield name, target


def find_matrices(model: Decoder, format: Format) -> dict[str, MatrixModule | Experts]:
    """Return {path: module} of the modules whose matrices may be quantised: all but routers and embeddings.

    An embedding that is tied to the LM head may be, if the format quantises the head. It stands for both of them.
    """
    found: dict[str, MatrixModule | Experts] = {}
    if format.bits == 16:
        return found
    routers = {module.gate for module in model.modules() if isinstance(module, SparseMLP)}
    for path, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            if not model.tied if isinstance(module, LMHead) else model.tied and format.quantizes_head:
                found[path] = module
        elif isinstance(module, MatrixModule | Experts) and module not in routers:
            found[path] = module
    return found


def count_bytes(model: Decoder, format: Format, itemsize: int) -> int:
    """Return the memory of a model's weights, if those that are not quantised take `itemsize` bytes each.

    Args:
        model: it may be on the meta device.
    """
    total = sum(parameter.numel() for parameter in model.parameters()) * itemsize
    for module in find_matrices(model, format).values():
        if isinstance(module, LMHead) and not format.quantizes_head:
            continue  # a checkpoint may have it quantised, but few have
        for weight in find_weights(module):
            size = weight.shape[-1]
            row = size * format.bits // 8 + format.count_groups(size) * (4 + 2 * format.has_zeros)
            total += weight.numel() // size * (row - size * itemsize)
    return total


def find_weights(module: MatrixModule | Experts) -> list[nn.Parameter]:
    """Return the matrices of a module, without its bias."""
    return [module.gate_up, module.down] if isinstance(module, Experts) else [module.weight]


def view_rows(values: Tensor, view: Tensor) -> Tensor:
    """Return the part of values [..., out, n] that belongs to a view of a parameter [..., out, in].

    Args:
        view: whole rows of the parameter.
    """
    size = view.shape[-1]
    n = values.shape[-1]
    strides = (stride // size * n for stride in view.stride()[:-1])
    return values.as_strided((*view.shape[:-1], n), (*strides, 1), view.storage_offset() // size * n)


class Assembly:
    """The codes of one parameter, which the parts of it fill."""

    def __init__(self, parameter: nn.Parameter, device: torch.device) -> None:
        self._shape = parameter.shape
        self._device = device
        self.codes: Codes | None = None
        self.missing = parameter.numel() - getattr(parameter, "padding", 0)
        """Elements of the parameter that have not come."""

    def put(self, view: Tensor, part: Codes) -> None:
        """Copy the codes of a part.

        Args:
            view: the place of the part in the parameter, or in one expert's matrix.

        Raises:
            ValueError: other parts of the parameter have another format, or other groups.
        """
        codes = self.codes
        if codes is None:
            codes = self.codes = self._make_like(part)
        alike = (part.bits, part.group_size, part.zeros is None) == (codes.bits, codes.group_size, codes.zeros is None)
        if not alike or not self._takes_order(view, part.order):
            raise ValueError("its format, its groups or the order of its columns differ from those of its neighbours")
        for values, own in ((part.codes, codes.codes), (part.scales, codes.scales), (part.zeros, codes.zeros)):
            if values is not None and own is not None:
                view_rows(own, view).copy_(values)
        self.missing -= view.numel()

    def finish(self) -> Codes:
        """Return the codes, all of whose parts have come."""
        codes = self.codes
        if codes is None or self.missing > 0:
            raise RuntimeError(f"{self.missing} elements of a quantised matrix have not been filled")
        if codes.zeros is not None and bool((codes.zeros == (0 if codes.bits == 8 else 8)).all()):
            return replace(codes, zeros=None)
        return codes

    def _make_like(self, part: Codes) -> Codes:
        """Return codes for the whole parameter, all zero, in the format of a part."""

        def zeros(values: Tensor) -> Tensor:
            return torch.zeros(*self._shape[:-1], values.shape[-1], dtype=values.dtype, device=self._device)

        return Codes(
            part.bits,
            zeros(part.codes),
            zeros(part.scales),
            None if part.zeros is None else zeros(part.zeros),
            part.group_size,
            None if part.order is None else part.order.new_full((*self._shape[:-2], self._shape[-1]), UNKNOWN),
        )

    def _takes_order(self, view: Tensor, order: Tensor | None) -> bool:
        """Note a part's order of columns. Return whether it is that of the other parts; each expert has its own."""
        assert self.codes is not None
        if order is None or self.codes.order is None:
            return order is self.codes.order
        own = self.codes.order
        if own.dim() == 2:
            own = own[view.storage_offset() // (self._shape[-2] * self._shape[-1])]
        if own[0] == UNKNOWN:
            own.copy_(order)
        return torch.equal(own, order)


class Filling:
    """Fills the matrices of one model. `attach` packs the matrices of a module that is complete."""

    def __init__(self, format: Format, model: Decoder, device: torch.device) -> None:
        """
        Args:
            model: tells shapes. Its matrices are on the meta device.
            device: the device that holds the codes.
        """
        self.format = format
        self.device = device
        self._model = model
        self._modules = find_matrices(model, format)
        self._assemblies: dict[int, Assembly] = {}
        """{id of a parameter: its codes}, for the parameters of which a part has come."""

    def find_targets(self, names: Collection[str], attaches: bool = True) -> Iterator[tuple[str, str, WeightTarget]]:
        """Yield what `find_module_targets` yields, with other targets where a matrix is quantised.

        Args:
            attaches: whether a module of the model is packed as soon as it is complete.
        """
        for path, name, target in find_module_targets(self._model, names):
            inner = target
            if path in self._modules and target.view.dim() > 1:
                place = (target.view, target.shape, target.slices)
                inner = RoundedTarget(*place, filling=self, path=path, attaches=attaches)
            tensors = self._find_tensors(name, target, names)
            if not tensors:
                yield path, name, inner
                continue
            prefix = name.removesuffix(".weight")
            make_raw = partial(RawTarget, filling=self, prefix=prefix, matrix=inner, come={}, num_tensors=len(tensors))
            view = target.view
            for suffix, (shape, dtypes) in tensors.items():
                yield path, f"{prefix}.{suffix}", make_raw(view, shape, (), dtypes=dtypes, suffix=suffix)
                view = view[:0]  # together they cover the matrix once

    def allocate_others(self, names: Collection[str]) -> None:
        """Allocate the matrices that are not quantised in a checkpoint with tensors of these names.

        Raises:
            ValueError: of several matrices that are multiplied as one, only some are quantised.
        """
        if self.format.quantizes_head:
            return  # all matrices are quantised
        quantized: dict[str, dict[str, bool]] = {path: {} for path in self._modules}
        for path, name, target in find_module_targets(self._model, names):
            if path in self._modules and target.view.dim() > 1:
                quantized[path][name] = bool(self._find_tensors(name, target, names))
        for path, found in quantized.items():
            if len(set(found.values())) > 1:
                some = next(name for name, is_quantized in found.items() if not is_quantized)
                raise ValueError(
                    f"{some} is not quantised, and others are that are multiplied with it as one matrix: "
                    "such checkpoints are not supported"
                )
            if not any(found.values()):
                module = self._modules.pop(path)
                for name, value in list(module.named_parameters(recurse=False)):
                    if value.is_meta:
                        setattr(module, name, materialize(value, self.device))
                self._model.backend.prepare_weights(module.parameters(recurse=False))

    def _find_tensors(self, name: str, target: WeightTarget, names: Collection[str]) -> RawTensors:
        if not name.endswith(".weight") or target.view.dim() != 2 or len(target.shape) != 2:
            return {}  # a convolution's weights are a matrix here, but not in the checkpoint
        return self.format.find_tensors(name.removesuffix(".weight"), names, *target.shape)

    def is_quantized(self, path: str) -> bool:
        """Return whether the matrices of the module at `path` become codes."""
        return path in self._modules

    def fill(self, path: str, values: Tensor, parameter: nn.Parameter) -> None:
        """Round the values of a whole parameter to codes: of dummy weights, which have no checkpoint."""
        self.put(path, parameter, self.format.round(values))
        self.attach_if_complete(path)

    def put(self, path: str, view: Tensor, part: Codes) -> None:
        """Take the codes for a view of a parameter. ValueError if they do not go with those that have come."""
        weights = find_weights(self._modules[path])
        parameter = next(weight for weight in weights if view is weight or view._base is weight)
        if id(parameter) not in self._assemblies:
            self._assemblies[id(parameter)] = Assembly(parameter, self.device)
        self._assemblies[id(parameter)].put(view, part)

    def attach_if_complete(self, path: str) -> None:
        """Pack the matrices of a module of the model if all their parts have come."""
        assemblies = [self._assemblies.get(id(weight)) for weight in find_weights(self._modules[path])]
        if all(assembly is not None and assembly.missing <= 0 for assembly in assemblies):
            self.attach(path, self._model.get_submodule(path), self._model)

    def attach(self, path: str, module: nn.Module, model: Decoder) -> None:
        """Pack the matrices of the module at `path`, whose codes have all come.

        Args:
            module: gets them; it belongs to `model`.
        """
        weights = find_weights(self._modules[path])
        dtype = weights[0].dtype
        codes = [self._assemblies.pop(id(weight)).finish() for weight in weights]
        empty = nn.Parameter(torch.empty(0, dtype=dtype, device=self.device), requires_grad=False)
        operators = model.backend.find_operators(MatrixOperators, "quantized")
        if isinstance(module, Experts):
            new = (operators.make_experts(each, dtype) for each in codes)
            gate_up, down = map(operators.keep_place, module.packed or (None, None), new)
            module.packed = (gate_up, down)
            module.gate_up = module.down = empty
            return
        assert isinstance(module, MatrixModule)
        matrix = operators.make_matrix(codes.pop(), dtype, self.format.rounds_inputs)
        matrix = operators.keep_place(module.packed, matrix)
        is_shared = model.tied and module is model.embed_tokens
        for owner in (module, model.lm_head) if is_shared else (module,):
            owner.packed = matrix
            owner.weight = empty


@dataclass(frozen=True, kw_only=True)
class RoundedTarget(WeightTarget):
    """A place for codes, which are made of a tensor of 16 or 32 bits by rounding, or come as codes.

    The scale is that of the whole row, also where ranks share it. So whole rows are read, a few at a time.
    """

    filling: Filling
    path: str
    attaches: bool

    def fill(self, source: Any, copy: Copy) -> None:
        rows, columns = find_place(self)
        if isinstance(source, Codes):
            self.filling.put(self.path, self.view, source.take_rows(rows).take_columns(columns))
        elif self.view.dim() == 2:
            self._round(self.view, source)
        else:
            for i, matrix in enumerate(self.view):
                self._round(matrix, source, i)
        if self.attaches:
            self.filling.attach_if_complete(self.path)

    def _round(self, view: Tensor, source: Any, *expert: int) -> None:
        _, columns = find_place(self)
        for rows, part in split_rows(self, view):
            values = source[*expert, rows, :].to(self.filling.device)
            self.filling.put(self.path, part, quantize_int8(values).take_columns(columns))


def find_place(target: WeightTarget) -> tuple[slice, slice]:
    """Return the rows and columns of the checkpoint's matrix, or of each expert's, that belong to a target."""
    rows, columns = target.slices[-2:]
    assert isinstance(rows, slice) and isinstance(columns, slice)
    return rows, columns


def split_rows(target: WeightTarget, view: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of a target a few at a time (ELEMENTS_AT_A_TIME): those of the checkpoint's matrix, and a view.

    A matrix without rows, as the last of many ranks may have of the vocabulary, has one part without rows.

    Args:
        view: the target's matrix, or that of one expert.
    """
    first = find_place(target)[0].start or 0
    height = max(1, ELEMENTS_AT_A_TIME // target.shape[-1])
    parts = view.split(height)  # type: ignore[no-untyped-call]
    for begin, part in zip(count(first, height), parts, strict=False):
        yield slice(begin, begin + len(part)), part


@dataclass(frozen=True, kw_only=True)
class RawTarget(WeightTarget):
    """A place for one of the tensors that make a matrix of a quantised checkpoint. The last one fills the matrix.

    Attributes:
        suffix: the end of the tensor's name.
        filling: what the matrix belongs to.
        prefix: the matrix's name in the checkpoint.
        matrix: where the matrix goes.
        come: {suffix: tensor} of those that have come; all targets of the matrix share it.
        num_tensors: how many tensors make the matrix.
    """

    suffix: str
    filling: Filling
    prefix: str
    matrix: WeightTarget
    come: dict[str, Tensor]
    num_tensors: int

    def fill(self, source: Any, copy: Copy) -> None:
        self.come[self.suffix] = source[...].to(self.filling.device)
        if len(self.come) < self.num_tensors:
            return
        try:
            weights: Any = self.filling.format.convert(self.come, *self.matrix.shape)
            self.come.clear()
            if isinstance(self.matrix, RoundedTarget):
                self.matrix.fill(weights, copy)
                return
            if isinstance(weights, Codes):
                weights = weights.dequantize()  # of a router, which is not quantised here, however it was stored
            _, columns = find_place(self.matrix)
            for rows, part in split_rows(self.matrix, self.matrix.view):
                part.copy_(weights[rows, columns])
        except ValueError as error:
            raise ValueError(f"{self.prefix}: {error}") from None
