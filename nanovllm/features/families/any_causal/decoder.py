"""A decoder around a causal model of transformers. Its modules compute; see layers.py and attend.py for what is ours.

Private names of transformers stand in this file and in attend.py. All of them are used while a model is loaded, so
another version of transformers fails then, or not at all.
"""

import copy
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nanovllm.backends import Backend, LayerCache
from nanovllm.config import ResolvedConfig
from nanovllm.features.families.any_causal.attend import DRY_RUN, NAME, AttentionLayer, Step, recording, register
from nanovllm.features.families.any_causal.building import build
from nanovllm.features.families.any_causal.layers import Embedding, Head, Swap, find_scale, list_leaves
from nanovllm.features.families.any_causal.numbers import check_numbers
from nanovllm.features.families.any_causal.whole import take_whole
from nanovllm.models.layers.embedding import LMHead
from nanovllm.models.layers.linear import MatrixModule
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import ShardedLayer, WeightTarget, make_whole_target
from nanovllm.models.model_config import find_refusal
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.ops.step_inputs import StepInputs
from nanovllm.utils.machine import default_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig


IGNORED = r"\.rotary_emb\.inv_freq$"
"""The form of names of tensors that old checkpoints have, and that config.json says as well."""


SHORT = 2
LONG = 600
"""The tokens of the two texts of the dry run. Some code does more for a long text, such as compressing its keys."""

META = "meta tensor"
"""Words of torch's errors for a tensor without values whose values are read."""


@contextmanager
def ignoring_packed_sequences() -> Iterator[None]:
    """Within, transformers does not look for packed sequences, for which it would read the positions."""
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda _: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


class KeepViews(TorchFunctionMode):
    """Within, `contiguous` copies nothing, so that a view of a tensor stays one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is Tensor.contiguous else function(*args, **(kwargs or {}))


class BodyOutput(tuple[Tensor]):
    """Stands for the output of transformers' layers: the hidden states. Whatever else is asked of it is None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Stub(nn.Module):
    """Stands for the layers while transformers' class computes logits of hidden states."""

    hidden: Tensor

    def forward(self, *_: Any, **__: Any) -> BodyOutput:
        return BodyOutput((self.hidden,))


class MetaBackend(Backend):
    """The backend of a model that only shapes run through. Norms are most of a model's calls, so they skip the work."""

    rms_norm = staticmethod(lambda x, weight, eps: torch.empty_like(x))


class Layers(list[SimpleNamespace]):
    """The layers, as the engine asks about them: `self_attn` and `mlp` of each."""

    body: nn.Module

    def modules(self) -> Iterator[nn.Module]:
        return self.body.modules()


last_built: dict[str, dict[torch.dtype, "AnyDecoder"]] = {}
"""The model that was built last, on the meta device: {its configuration as JSON: {the default dtype: the model}}.

An engine whose dtype is not the checkpoint's needs it in both.
"""


def make_decoder(config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> "AnyDecoder":
    """Return a model on the meta device.

    To build one takes a second, and an engine needs three: its options, its memory and its weights. Each gets a copy of
    the first.
    """
    if parallel.size > 1:  # of a draft model, whose options follow the model's
        name = (config.architectures or ["this model"])[0]
        raise ValueError(
            f"{name} runs through transformers' code, on one rank: leave tensor_parallel_size ({parallel.size}) at 1; "
            "data_parallel_size makes replicas"
        )
    key = config.to_json_string(use_diff=False)
    if key not in last_built:
        last_built.clear()
        last_built[key] = {}
    dtype = torch.get_default_dtype()
    built = last_built[key].get(dtype)
    if built is None:
        built = AnyDecoder(config)
        last_built[key][dtype] = built
    return copy.deepcopy(built, {id(built.backend): backend})  # the memo says what is not copied


class AnyDecoder(nn.Module):
    """The model of one rank. It has the attributes and methods of `Decoder`.

    Attributes:
        hf: transformers' model; a stub takes the place of its layers.
        body: its layers, with embedding and last norm.
        tied: whether the LM head is the embedding.
        elsewhere: names of tensors in a checkpoint that transformers does not read either.
        most_positions: the most positions that its angles are made for, if they would change beyond; else None.
    """

    cos_sin: Tensor
    elsewhere: tuple[str, ...] = ()

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__()
        register()
        self.backend: Backend = MetaBackend("meta")
        self.most_positions: int | None = None
        self.hf = build(copy.deepcopy(config))
        patterns = [IGNORED, *(self.hf._keys_to_ignore_on_load_unexpected or ())]
        self._ignored = re.compile("|".join(patterns))
        self.step = Step()
        try:
            check_numbers(config, self.hf)
            refuse_kinds(self.hf)
            refuse_states(self.hf)
            self._prepare_buffers()
            self._fix_angles()
            self._take_body()
            with torch.device("meta"):
                self._swap_ends()
                swap = Swap(self.backend)
                swap.swap_children(self.body)
                take_whole(self.body, swap)
            self.layers = self._run_dry(int(config.num_hidden_layers))
            refuse_own_positions(self.body)
        except ValueError as error:
            name = type(self.hf).__name__
            raise ValueError(f"{name} cannot run through transformers' code: {error}") from error
        self.cos_sin = torch.empty(0, device="cpu")

    # ---- building

    def _prepare_buffers(self) -> None:
        """Make parameters of the buffers that checkpoints have, and keep in float32 what transformers keeps so."""
        wide = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in self.hf._keep_in_fp32_modules_strict) or "$^")
        for path, module in self.hf.named_modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    del module._buffers[name]
                    module.register_parameter(name, nn.Parameter(buffer.to("meta"), requires_grad=False))
            for name, value in module.named_parameters(path, recurse=False):
                if wide.search(name):
                    value.data = value.data.float()

    def _fix_angles(self) -> None:
        """Refuse angles that depend on the longest sequence of a step. longrope keeps the table of short sequences."""
        for module in self.hf.modules():
            kinds = getattr(module, "rope_type", None)
            for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
                if kind == "dynamic":
                    raise ValueError("its rope type is dynamic: a sequence's angles depend on others of its step")
                if kind == "longrope":
                    rope = self.hf.config.rope_parameters
                    self.most_positions = int(rope["original_max_position_embeddings"])
                    forward = type(module).forward
                    while hasattr(forward, "__wrapped__"):
                        forward = forward.__wrapped__  # the last of them does not choose a table
                    module.forward = MethodType(torch.no_grad()(forward), module)

    def _take_body(self) -> None:
        """Take the layers out of transformers' model, and put a stub there."""
        body = self.hf.get_decoder()
        body.warn_if_padding_and_no_attention_mask = lambda *_: None  # it would read the ids
        self.body_path = find_path(self.hf, body)
        self._embedding_path = find_path(body, self.hf.get_input_embeddings())
        self._head_path = find_path(self.hf, self.hf.get_output_embeddings())
        self.stub = Stub()
        self.hf.set_submodule(self.body_path, self.stub)
        self.body = body

    def _swap_ends(self) -> None:
        """Put our embedding and LM head in the places of theirs."""
        embedding = self.body.get_submodule(self._embedding_path)
        head = self.hf.get_submodule(self._head_path)
        if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
            raise ValueError(f"its embedding is {type(embedding).__name__} and its head {type(head).__name__}")
        self.tied = head.weight is embedding.weight
        with torch.device("cpu"), default_dtype(torch.float32), torch.no_grad():
            scale = find_scale(embedding)
        own_head = Head(head)
        own_embedding = Embedding(embedding, scale)
        if self.tied:
            own_head.weight = own_embedding.weight
        self.body.set_submodule(self._embedding_path, own_embedding)
        self.hf.set_submodule(self._head_path, own_head)

    def _run_dry(self, num_layers: int) -> Layers:
        """Compute a short and a long text without memory. Each call of attention says what its layer needs.

        Raises:
            ValueError: some layers do not call attention, or transformers' code reads the device; or a long text needs
                something else than a short one.
        """
        longest = int(getattr(self.hf.config, "max_position_embeddings", None) or LONG)
        calls, later = (self._record_calls(num_tokens) for num_tokens in (SHORT, min(max(longest, SHORT), LONG)))
        if len(calls) != num_layers:
            raise ValueError(f"{len(calls)} of {num_layers} layers call transformers' attention function")
        if len(later) != num_layers or not all(map(AttentionLayer.asks_like, calls, later)):
            raise ValueError("its layers ask for another attention in a long text than in a short one")
        for layer in calls:
            layer.backend = self.backend
            layer.step = self.step
            layer.module.__dict__["nanovllm_layer"] = layer
        matrices = [module for module in self.body.modules() if isinstance(module, MatrixModule)]
        widest = max((m.weight.shape[0] for m in matrices if not isinstance(m, Embedding)), default=0)
        experts = [getattr(module, "k", 1) for module in self.body.modules()]
        mlp = SimpleNamespace(count_activations=lambda: 3 * widest * max(experts))
        layers = Layers(SimpleNamespace(self_attn=layer, mlp=mlp) for layer in calls)
        layers.body = self.body
        return layers

    def _record_calls(self, num_tokens: int) -> list[AttentionLayer]:
        """Compute a text on the meta device. Return its calls of attention."""
        ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
        positions = torch.arange(num_tokens, device="meta")[None]
        buffers = [(m, name, value) for m in self.modules() for name, value in m._buffers.items() if value is not None]
        for module, name, value in buffers:
            module._buffers[name] = value.to("meta")
        self.choose_attention(DRY_RUN)
        try:
            with torch.no_grad(), torch.device("meta"), ignoring_packed_sequences(), recording(num_tokens) as calls:
                self.body(input_ids=ids, position_ids=positions, use_cache=False)
        except Exception as error:  # whatever their code raises for tensors without values
            told = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError("its code reads the device while it computes" if META in told else told) from error
        finally:
            for module, name, value in buffers:
                module._buffers[name] = value
            self.choose_attention()
        return calls

    def choose_attention(self, name: str = NAME) -> None:
        """Have all modules call the attention function of this name in transformers' table: by default the engine's."""
        for module in (*self.hf.modules(), *self.body.modules()):
            own: Any = getattr(module, "config", None)
            if hasattr(own, "_attn_implementation_internal"):
                own._attn_implementation_internal = name

    def count_modules(self) -> tuple[int, int]:
        """Return how many of the modules that compute are ours, and how many there are."""
        leaves = list_leaves(self)
        return sum(isinstance(module, ShardedLayer) for module in leaves), len(leaves) - 1  # without the stub

    # ---- what the engine asks of a decoder

    @property
    def embed_tokens(self) -> Any:
        return self.body.get_submodule(self._embedding_path)

    @property
    def lm_head(self) -> Any:
        return self.hf.get_submodule(self._head_path)

    def fill_tables(self, config: "PretrainedConfig", num_positions: int, device: torch.device) -> None:
        """Move the tables of angles, which transformers has filled, to the device."""
        for module in self.modules():
            for name, value in module._buffers.items():
                module._buffers[name] = None if value is None else value.to(device)
        self.cos_sin = self.cos_sin.to(device)  # only its device is read
        layers = [layer.self_attn for layer in self.layers]
        self._forms: dict[tuple[int, ...], Any] = {}
        for layer in layers:
            self._forms.setdefault(layer.form, layer)
        for dim in {layer.stored_dim for layer in layers}:
            half = torch.ones(1, dim // 2, device=device)
            self.step.norms[dim] = NormRope(None, None, 0.0, torch.cat((half, torch.zeros_like(half)), 1))

    def prove(self, config: ResolvedConfig) -> None:
        """Compare the loaded model with transformers' own attention, if tests run no model like it."""
        from nanovllm.features.families.any_causal.proof import TESTED, prove

        if type(self.hf).__name__ not in TESTED or find_refusal(self.hf.config):
            with self.backend.on_device(), torch.inference_mode(), self.backend.with_threads():
                prove(self, config)

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> Tensor:
        """Compute the hidden states of all tokens, [num_tokens, hidden], after the last norm."""
        step = self.step
        step.caches = caches
        step.origin = torch.zeros_like(inputs.positions)
        for form, layer in self._forms.items():
            cache: Any = caches[layer.source]
            is_first = not step.inputs  # the runner has prepared the inputs for the first layer
            prepare = self.backend.prepare_attention
            step.inputs[form] = inputs if is_first else prepare(inputs, cache, layer.num_heads)
        try:
            ids = inputs.token_ids[None].long()
            output = self.body(input_ids=ids, position_ids=inputs.positions[None].long(), use_cache=False)
        finally:
            step.inputs = {}
            step.caches = []
            step.angles = {}
        hidden: Tensor = output[0][0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """hidden [n, hidden] -> logits [n, vocab]. transformers' class scales, caps and adds what it must."""
        self.stub.hidden = hidden[None]
        logits: Tensor = self.hf(inputs_embeds=self.stub.hidden, use_cache=False).logits[0]
        del self.stub.hidden
        return logits

    # ---- weights

    def find_own_targets(self, names: Collection[str] = ()) -> Iterator[tuple[str, str, WeightTarget]]:
        """Yield (path of the module here, name in a checkpoint, place to load it to): see `find_module_targets`.

        transformers knows how to turn its modules' tensors into those of a checkpoint. Here it does that with tensors
        that have no memory. Where each result begins, and how its elements lie, says which part of our tensor it is.
        A tensor that `names` has by its name in transformers' modules stays whole: trainers send them so.

        Raises:
            ValueError: a result is no part of a tensor, but computed from it.
        """
        from transformers.core_model_loading import revert_weight_conversion

        own = {name: (path, target) for path, name, target in self._list_targets()}
        wanted = set(names)
        stand_ins = {
            name: torch.empty_strided(target.view.shape, target.view.stride(), device="meta")
            for name, (_, target) in own.items()
        }
        owners = {stand_in.untyped_storage()._cdata: name for name, stand_in in stand_ins.items()}
        with torch.no_grad(), KeepViews():
            reverted = revert_weight_conversion(self.hf, dict(stand_ins))
        as_modules = {name for name in wanted.intersection(own) if name not in reverted}
        parts = {**reverted, **{name: stand_ins[name] for name in as_modules}}
        self.elsewhere = tuple(name for name in wanted if name not in parts and self._ignored.search(name))
        for name, part in parts.items():
            owner = owners.get(part.untyped_storage()._cdata)
            if owner is None:
                raise ValueError(f"{name} in checkpoints is computed from several tensors, which is not supported")
            if owner in as_modules and name != owner:
                continue
            path, target = own[owner]
            view = target.view
            if part.shape != view.shape or part.stride() != view.stride():
                view = view.as_strided(part.shape, part.stride(), view.storage_offset() + part.storage_offset())
            if not view.dim():  # a checkpoint may have it with one dimension, too
                yield path, name, WeightTarget(view.view(1), (1,), (...,), target.plus)  # type: ignore[arg-type]
            else:
                yield path, name, make_whole_target(view, target.plus)

    def _list_targets(self) -> Iterator[tuple[str, str, WeightTarget]]:
        """Yield (path of the module here, name in transformers' model, the tensor there)."""
        for path, module in self.named_modules():
            there = path.removeprefix("hf").removeprefix(".")
            if path == "body" or path.startswith("body."):
                there = self.body_path + path.removeprefix("body")
            if isinstance(module, ShardedLayer):
                for name, target in module.weight_targets(there, ()):
                    is_embedding = isinstance(module, LMHead) and self.tied and name.endswith(".weight")
                    if not is_embedding:
                        yield path, name, target
                continue
            for name, value in module.named_parameters(recurse=False):
                yield path, f"{there}.{name}", make_whole_target(value)


def find_path(model: nn.Module, module: nn.Module) -> str:
    """Return the path of a module in a model; ValueError if it is not there."""
    path = next((path for path, other in model.named_modules() if other is module), "")
    if not path:
        raise ValueError(f"its {type(module).__name__} is no part of it")
    return path


def refuse_own_positions(body: nn.Module) -> None:
    """Raise a ValueError if the layers do not take a step's positions, or if a model's first position is not 0."""
    takes_positions = "position_ids" in inspect.signature(type(body).forward).parameters
    if not takes_positions or any(hasattr(module, "create_position_ids_from_input_ids") for module in body.modules()):
        raise ValueError("its code counts the positions of tokens itself, or begins to count after 0")


def refuse_kinds(model: nn.Module) -> None:
    """Raise a ValueError if layers attend in a way that the engine lacks, or tables of a checkpoint hold no floats."""
    config: Any = model.config
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(f"its layers attend within chunks of {config.attention_chunk_size} tokens, not in windows")
    for name, module in model.named_modules():
        if name.endswith("indexer"):
            raise ValueError(f"it has sparse attention with an indexer ({name}), which chooses the keys of each token")
        if any(isinstance(value, complex) for value in vars(module).values()):
            raise ValueError(f"{name} computes with a complex number, so a value of config.json is wrong")
        for table, value in module.named_buffers(recurse=False):
            if table not in module._non_persistent_buffers_set and not value.is_floating_point():
                raise ValueError(
                    f"its checkpoints have a table of {value.dtype}, {name}.{table}, and floats alone are read"
                )


def refuse_states(model: nn.Module) -> None:
    """Raise a ValueError if a module keeps a state from token to token. It may lie beside attention, in one layer.

    A compressor makes keys of many tokens, and a class with a cache of its own keeps more there than keys and values.
    """
    from transformers.cache_utils import Cache, CacheLayerMixin

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) or hasattr(module, "A_log"):
            raise ValueError(f"{name} keeps a state from token to token, for which this engine has no place there")
        if "Compressor" in type(module).__name__:
            raise ValueError(f"{name} compresses keys and values of many tokens, for which this engine has no place")
    own = type(model).__module__
    for value in vars(sys.modules[own]).values():
        if isinstance(value, type) and issubclass(value, Cache | CacheLayerMixin) and value.__module__ == own:
            raise ValueError(f"it has a cache of its own ({value.__name__}), for which this engine has no place")
