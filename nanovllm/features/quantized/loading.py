"""Fills a model with quantised matrices: tensors become codes as they are read, and whole modules are laid."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanovllm.backends import make_backend
from nanovllm.config import ResolvedConfig
from nanovllm.features.quantized.checkpoints import find_format
from nanovllm.features.quantized.codes import ELEMENTS_AT_A_TIME, Codes, quantize_int8
from nanovllm.features.quantized.formats import INT8, Format, RawTensors
from nanovllm.features.quantized.joining import Weights, are_whole, join_parts
from nanovllm.features.quantized.torch_matrix import MatrixOperators
from nanovllm.models.decoder import Decoder
from nanovllm.models.layers.embedding import LMHead, VocabParallelEmbedding
from nanovllm.models.layers.weights import NamedTargets, ShardedLayer, WeightTarget
from nanovllm.models.weight_names import find_module_targets
from nanovllm.models.weight_reader import materialize
from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


class ModelQuantizer:
    """Gives one rank's model quantised matrices, which weight_reader.py, dummy_weights.py and renewal.py fill.

    The model is made on torch's meta device, so that no matrix is ever in memory with 16 bits for each weight.
    """

    def __init__(self, config: ResolvedConfig, hf_config: "PretrainedConfig") -> None:
        """ValueError if the checkpoint's format is not supported, or not the one that the option asks for."""
        format = find_format(config.quantization, hf_config)
        if format is None:
            raise ValueError("neither config.json nor the option quantization asks for quantised weights")
        if config.lora is not None and not format.is_made_at_load:
            raise ValueError(
                f"lora is {quote(config.lora)}, and the checkpoint is quantised already: an adapter can be merged only "
                'into a checkpoint of 16 or 32 bits; quantization="int8" quantises the merged weights'
            )
        self.format = format
        self._config = config
        self._device = torch.device(config.device)

    @property
    def rounds_at_load(self) -> bool:
        """Whether codes are made of a checkpoint's numbers by rounding, so that new weights may come."""
        return self.format.rounds

    def count_bytes(self, model: Decoder, itemsize: int) -> int:
        """Return the memory of a model's weights, if those that are not quantised take `itemsize` bytes each."""
        return count_bytes(model, self.format, itemsize)

    def describe(self) -> str:
        """Return how the weights are stored, for a table: see `Format.describe`."""
        return self.format.describe(self._config.dtype)

    def check(self) -> None:
        """Raise a ValueError if the backend cannot multiply matrices of the format."""
        reason = self._find_operators().why_cannot(self.format)
        if reason is not None:
            raise ValueError(f"quantization is {quote(self._config.quantization)}: {reason}")

    def announce(self, model: Decoder) -> None:
        """Log what a user should know of the format. `model` is the whole one."""
        if self.format.bits == 16:
            dtype = self._config.dtype
            itemsize = getattr(torch, dtype).itemsize
            num_bytes = self.count_bytes(model, itemsize)
            int8_bytes = count_bytes(model, INT8, itemsize)
            logger.warning(
                "the checkpoint's weights of %d bits (%s) become %s while they are read, and take %.2f GiB in all; "
                'quantization="int8" takes %.2f GiB',
                *(self.format.stored_bits, self.format.name, dtype, num_bytes / 2**30, int8_bytes / 2**30),
            )
            return
        if self.format.input_scales is not None and getattr(self.format, "has_input_scales", False):
            logger.warning(
                "the checkpoint's scales of activations are not used: %s computes others for each token",
                self.format.name,
            )
        if cost := self.format.describe_cost(self._config.dtype):
            logger.warning("%s", cost)
        self._find_operators().warn(self.format)

    def _find_operators(self) -> MatrixOperators:
        backend = make_backend(self._config.attention_backend, self._config.device)
        return backend.find_operators(MatrixOperators, "quantized")

    def list_matrices(self, model: Decoder) -> list[nn.Parameter]:
        return [weight for module in find_matrices(model, self.format).values() for weight in module.list_matrices()]

    def begin(self, model: Decoder, attaches: bool = True) -> "Filling":
        """Return what fills the matrices of a model once. Several may be begun, and not all need to be finished.

        Args:
            attaches: whether a module gets its matrices as soon as they are whole. Else somebody calls `attach`.
        """
        return Filling(self.format, model, self._device, attaches)

    def find_targets(self, model: Decoder, names: Collection[str]) -> NamedTargets:
        """Yield what `weight_names.find_weight_targets` yields, with other targets where a matrix is quantised."""
        return ((name, target) for _, name, target in self.begin(model).find_targets(names))


def find_matrices(model: Decoder, format: Format) -> dict[str, ShardedLayer]:
    """Return {path: module} of the modules whose matrices may be quantised: all that list some, but embeddings.

    An embedding that is tied to the LM head may be, if the format quantises the head. It stands for both of them.
    """
    found: dict[str, ShardedLayer] = {}
    if format.bits == 16:
        return found
    for path, module in model.named_modules():
        if isinstance(module, LMHead):
            may_be = not model.tied
        elif isinstance(module, VocabParallelEmbedding):
            may_be = model.tied and format.quantizes_head
        else:
            may_be = isinstance(module, ShardedLayer) and len(module.list_matrices()) > 0
        if may_be:
            found[path] = module
    return found


def count_bytes(model: Decoder, format: Format, itemsize: int) -> int:
    """Return the memory of a model's weights, if those that are not quantised take `itemsize` bytes each.

    Args:
        model: it may be on the meta device.
    """
    total = sum(parameter.numel() for parameter in model.parameters()) * itemsize
    modules = find_matrices(model, format)
    for path, name, target in find_module_targets(model):
        module = modules.get(path)
        weight = find_matrix(module, target.view)
        is_head = isinstance(module, LMHead) and not format.quantizes_head  # a checkpoint may have it, but few have
        if weight is not None and not is_head:
            size = weight.shape[-1]
            row_bytes = format.count_row_bytes(size, itemsize, name.removesuffix(".weight"))
            total += target.view.numel() // size * (row_bytes - size * itemsize)
    return total


def list_owners(module: nn.Module, model: Decoder) -> tuple[Any, ...]:
    """Return a module of a model, and the LM head if that has the same matrix."""
    is_shared = model.tied and module is model.embed_tokens
    return (module, model.lm_head) if is_shared else (module,)


def find_matrix(module: ShardedLayer | None, view: Tensor) -> nn.Parameter | None:
    """Return the matrix of a module of which `view` is a part; None for a part of a bias, say."""
    matrices = () if module is None else module.list_matrices()
    return next((weight for weight in matrices if view is weight or view._base is weight), None)


class Filling:
    """Fills the matrices of one model: it collects their parts as codes, and lays the matrices of whole modules."""

    def __init__(self, format: Format, model: Decoder, device: torch.device, attaches: bool) -> None:
        """
        Args:
            model: tells shapes. Its matrices are on the meta device.
            device: the device that holds the codes.
            attaches: see `ModelQuantizer.begin`.
        """
        self.format = format
        self.device = device
        self._model = model
        self._attaches = attaches
        self._modules = find_matrices(model, format)
        self._parts: dict[int, dict[int, Weights]] = {}
        """{id of a parameter: {where a part begins in it: the part}}, for the parameters of which a part has come."""

    def find_targets(self, names: Collection[str]) -> Iterator[tuple[str, str, WeightTarget]]:
        """Yield what `find_module_targets` yields, with other targets where a matrix is quantised, here or there.

        Modules that have no quantised matrix in a checkpoint with tensors of these names get memory first.
        """
        self._allocate_others(names)
        for path, name, target in find_module_targets(self._model, names):
            prefix = name.removesuffix(".weight")
            stored = self._find_tensors(name, target, names)
            if stored:  # {name of a tensor that makes the matrix: its suffix, shape and possible number formats}
                tensors = {f"{prefix}{self.format.joint}{suffix}": (suffix, *facts) for suffix, facts in stored.items()}
            elif self.has_codes(path, target.view):  # there are numbers, which are rounded, or kept beside codes
                tensors = {name: ("", target.shape, target.dtypes)}
            else:
                yield path, name, target
                continue
            part = Part(self, path, prefix, target, len(tensors))
            view = target.view
            for own_name, (suffix, shape, dtypes) in tensors.items():
                yield path, own_name, PartTarget(view, shape, (), dtypes=dtypes, suffix=suffix, part=part)
                view = view[:0]  # together they cover the matrix once

    def _allocate_others(self, names: Collection[str]) -> None:
        """Allocate the matrices of modules that are not quantised in a checkpoint with tensors of these names."""
        if self.format.rounds:
            return  # all matrices are quantised
        quantized = set()
        for path, name, target in find_module_targets(self._model, names):
            if self.has_codes(path, target.view) and self._find_tensors(name, target, names):
                quantized.add(path)
        for path in [path for path in self._modules if path not in quantized]:
            module = self._modules.pop(path)
            for name, value in list(module.named_parameters(recurse=False)):
                if value.is_meta:
                    made = materialize(value, self.device)
                    for owner in list_owners(module, self._model):
                        setattr(owner, name, made)
            self._model.backend.prepare_weights(module.parameters(recurse=False))

    def _find_tensors(self, name: str, target: WeightTarget, names: Collection[str]) -> RawTensors:
        # The checkpoint's shape counts: a convolution's weights are a matrix here, and not there.
        return self.format.find_tensors(name.removesuffix(".weight"), names, *target.shape)

    def _find_matrix(self, path: str, view: Tensor) -> nn.Parameter | None:
        """Return the matrix that becomes codes, and of which `view` is a part; None for a part of a bias, say."""
        return find_matrix(self._modules.get(path), view)

    def is_quantized(self, path: str) -> bool:
        """Return whether the matrices of the module at `path` become codes."""
        return path in self._modules

    def has_codes(self, path: str, view: Tensor) -> bool:
        """Return whether what `view` shows becomes codes. The biases of a module do not, even those of experts."""
        return self._find_matrix(path, view) is not None

    def fill(self, path: str, values: Tensor, parameter: nn.Parameter) -> None:
        """Round the values of a whole parameter to codes: of dummy weights, which have no checkpoint."""
        self.put(path, parameter, self.format.round(values))
        self.attach_if_whole(path)

    def put(self, path: str, view: Tensor, part: Weights) -> None:
        """Keep what fills a view of a parameter: rows of it, or of one expert's matrix."""
        parameter = self._find_matrix(path, view)
        assert parameter is not None
        self._parts.setdefault(id(parameter), {})[int(view.storage_offset())] = part

    def attach_if_whole(self, path: str) -> None:
        """Lay the matrices of a module of the model if all their parts have come."""
        module = self._modules[path]
        matrices = module.list_matrices()
        if self._attaches and all(are_whole(self._parts.get(id(one), {}).values(), one) for one in matrices):
            self.attach(path, module, self._model)

    def attach(self, path: str, module: nn.Module, model: Decoder) -> None:
        """Lay the matrices of the module at `path`, whose codes have all come.

        Args:
            module: gets them; it belongs to `model`.
        """
        assert isinstance(module, ShardedLayer)
        weights = self._modules[path].list_matrices()
        dtype = weights[0].dtype
        empty = nn.Parameter(torch.empty(0, dtype=dtype, device=self.device), requires_grad=False)
        operators = model.backend.find_operators(MatrixOperators, "quantized")
        packed: list[Any] = []
        for weight, old in zip(weights, module.list_packed() or (None,) * len(weights), strict=True):
            parts = self._parts.pop(id(weight))
            joined = join_parts([parts[place] for place in sorted(parts)], weight)
            parts.clear()
            laid = operators.lay_beside([self._complete(one) for one in joined], dtype)
            packed.append(operators.keep_place(old, laid))
        for owner in list_owners(module, model):
            owner.set_packed(packed, empty)

    def _complete(self, weights: Weights) -> Weights:
        """Add to codes what the format says of all products. ValueError if codes cannot be multiplied so."""
        if not isinstance(weights, Codes) or self.format.input_scales is None:
            return weights
        if weights.zeros is not None:
            raise ValueError(f"its codes have zeros, which {self.format.name} does not take: leave quantization out")
        return replace(weights, input_scales=self.format.input_scales)


@dataclass
class Part:
    """A part of a module's matrices, which one or several tensors of a checkpoint make. The last that comes fills it.

    Attributes:
        path: of the module.
        name: the part's name in the checkpoint.
        place: where it goes. A view of experts may be transposed: then the checkpoint has [in, out] of each expert.
        count: how many tensors make it.
        come: {suffix: tensor} of those that have come.
    """

    filling: Filling
    path: str
    name: str
    place: WeightTarget
    count: int
    come: dict[str, Tensor] = field(default_factory=dict)

    def add(self, suffix: str, source: Any) -> None:
        """Take one of the tensors. Without a suffix it is the part itself, in floats."""
        try:
            if not suffix:
                self._fill(source)
                return
            self.come[suffix] = source[...].to(self.filling.device)
            if len(self.come) == self.count:
                weights = self.filling.format.convert(self.come, *self.place.shape[-2:])
                self.come.clear()
                self._fill(weights)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _fill(self, weights: Any) -> None:
        """Fill the part: with codes, or with what gives floats when it is sliced.

        Floats are rounded, or kept beside codes, as the format says. The scale is that of the whole row, also where
        ranks share it. So whole rows are read, of one expert at a time.
        """
        filling = self.filling
        view = self.place.view
        if not filling.has_codes(self.path, view):  # a router or an embedding, say, however it was stored
            pieces: Iterable[tuple[WeightTarget, Any]] = [(self.place, weights)]
            if isinstance(weights, Codes):
                pieces = split_rows(self.place, weights)
            for place, source in pieces:
                place.fill(source, Tensor.copy_)
            return
        *_, rows, columns = self.place.slices
        assert isinstance(rows, slice) and isinstance(columns, slice)
        if isinstance(weights, Codes):
            filling.put(self.path, view, weights.take_rows(rows).take_columns(columns))
        else:
            everything = slice(None)
            experts: list[tuple[int, ...]] = [()] if view.dim() == 2 else [(i,) for i in range(len(view))]
            for expert in experts:
                if view.stride(-1) == 1:
                    values = weights[(*expert, rows, everything)]
                    share = columns
                else:  # transposed: see `place`
                    values = weights[(*expert, everything, columns)].T
                    share = rows
                values = values.to(filling.device)
                if filling.format.rounds:
                    filling.put(self.path, view[expert], quantize_int8(values).take_columns(share))
                else:
                    filling.put(self.path, view[expert], values[:, share].to(view.dtype))
        filling.attach_if_whole(self.path)


def split_rows(place: WeightTarget, codes: Codes) -> Iterator[tuple[WeightTarget, Tensor]]:
    """Yield parts of a place [out, in] with their weights, float32: a few rows at a time are dequantised."""
    rows, columns = place.slices
    assert isinstance(rows, slice)
    own = codes.take_rows(rows)
    height = max(1, ELEMENTS_AT_A_TIME // codes.in_features)
    for start in range(0, own.out_features, height):
        part = slice(start, start + height)
        yield replace(place, view=place.view[part], slices=(slice(None), columns)), own.take_rows(part).dequantize()


@dataclass(frozen=True, kw_only=True)
class PartTarget(WeightTarget):
    """A place for one of the tensors of a part; `suffix` is the end of its name."""

    suffix: str
    part: Part

    def fill(self, source: Any, copy: Callable[[Tensor, Tensor], object]) -> None:
        self.part.add(self.suffix, source)
