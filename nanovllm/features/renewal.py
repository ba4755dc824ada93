"""New weights in a running engine, and an engine that sleeps: for reinforcement learning, and for many checkpoints."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from nanovllm.engine.claim import Activity, State
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.features.adapters.lora import Adapter
from nanovllm.models.decoder import find_decoder
from nanovllm.models.headers import ROWS_AT_A_TIME
from nanovllm.models.layers.linear import MatrixModule
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import WeightTarget
from nanovllm.models.model_config import find_ends, find_family, is_headless
from nanovllm.models.model_folder import ModelFolder
from nanovllm.models.weight_names import find_elsewhere, find_module_targets, name_canonically, name_some
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils.checks import as_bool, as_choice, as_integer, as_list, quote
from nanovllm.utils.machine import default_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Command = dict[str, Any]
"""Tells every rank what to do: "do", and its arguments. It travels as JSON."""

ALSO_LOADS_IN = (State.LOADING, State.LOADED, State.REPLACED)
"""The states, beside READY, in which new weights may come."""

TAGS = ("weights", "kv_cache")
"""Names of the parts that vLLM's `wake_up` can bring back one by one."""


class Renewal:
    """Replaces the weights of an engine, and frees and restores its memory. `LLM` has a method for each of these.

    It checks what is asked for, on rank 0, and has every rank do it.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._claim = engine.claim
        runner: Any = engine.runner
        self._rank = RankRenewal(getattr(runner, "local", runner))
        self._send: Callable[[Command, Tensor | None], None] | None = getattr(runner, "send_command", None)
        """Sends a command to the other ranks; None if there are none."""
        self._num_blocks = engine.scheduler.block_manager.num_blocks
        self._level = 0
        """The level of the sleep; 0 while the engine is awake."""
        self.has_new_weights = False
        """Whether `load_weights` has replaced weights."""

    def _command(self, command: Command, tensor: Tensor | None = None) -> None:
        """Have every rank run a command. If one fails, no rank can go on, and the engine is closed."""
        with self._claim.work():
            try:
                if self._send is not None:
                    self._send(command, tensor)
                self._rank.run(command, tensor)
            except BaseException:
                self._engine.close()
                raise

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], finish: bool) -> None:
        """Replace weights: see `LLM.load_weights`."""
        as_bool(finish, "finish")
        quantizer = getattr(self._rank.runner, "quantizer", None)  # replicas have theirs in processes of their own
        if quantizer is not None and not quantizer.rounds_at_load:
            raise RuntimeError(
                f"the engine's checkpoint is quantised ({self._engine.config.quantization}); new weights are for "
                'engines without quantization, or with "int8", "int8-dynamic" or "w8a8": make another engine'
            )
        self._claim.check(ALSO_LOADS_IN)
        tensors = list_pairs(named_tensors)  # before the claim: what yields them may use the engine
        with self._claim.held_by(Activity("load_weights()"), ALSO_LOADS_IN):
            self._load(tensors, finish)

    def _load(self, tensors: list[tuple[str, Tensor]], finish: bool) -> None:
        with self._claim.work():
            if self._claim.state not in (State.LOADING, State.LOADED):
                self._rank.forget_load()  # of a whole model that nobody has finished
            load = self._rank.load
            targets = load.check(tensors, finish)
        if finish and (lacking := load.find_lacking(targets)):
            if load.has_written:
                self._engine.close()
                raise ValueError(f"{lacking}; the engine is closed, because other weights were replaced already")
            self._command({"do": "forget"})
            if self._claim.state is State.LOADING:
                self._claim.state = State.READY
            raise ValueError(lacking)
        canonical = name_canonically((name for name, _ in tensors), self._rank.runner.hf_config)
        self._claim.state = State.LOADING  # also if a Ctrl-C comes between two tensors
        self._forget_prefixes()
        for name, tensor in tensors:
            if targets[canonical[name]]:
                dtype = str(tensor.dtype).removeprefix("torch.")
                command = {"do": "write", "name": canonical[name], "shape": list(tensor.shape), "dtype": dtype}
                self._command(command, tensor)
        self.has_new_weights = self.has_new_weights or load.has_written
        if finish:
            self._command({"do": "forget"})
            self._claim.state = State.READY
        elif load.is_whole:
            self._command({"do": "renew"})
            self._claim.state = State.LOADED

    def sleep(self, level: int) -> None:
        """Free memory: see `LLM.sleep`."""
        level = as_integer(level, "level", 1, 2, "1 (frees the KV cache) or 2 (frees the weights, too)")
        with self._claim.held_by(Activity("sleep()")):
            self._forget_prefixes()
            self._claim.state = State.ASLEEP
            self._level = level
            self._command({"do": "sleep", "level": level})

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Take the memory again: see `LLM.wake_up`."""
        for tag in as_list(tags, "tags", "None, or a list of weights and kv_cache"):
            as_choice(tag, "a tag of wake_up", TAGS)
        self._claim.check_open()
        if not self._level:
            return
        with self._claim.held_by(Activity("wake_up()"), (State.ASLEEP,)):
            if self._level:  # no other thread has done it meanwhile
                self._command({"do": "wake_up", "level": self._level, "num_blocks": self._num_blocks})
                is_replaced = self._level == 2 and self.has_new_weights
                self._claim.state = State.REPLACED if is_replaced else State.READY
                self._level = 0

    def check_adapter(self, checkpoint: Path, folder: str, option: str) -> None:
        """Raise a ValueError unless an adapter can be merged into a checkpoint. Nothing is written.

        Args:
            checkpoint: the model's folder.
            option: what names the adapter's folder, for error messages.
        """
        adapter = Adapter(folder, option)
        with open_checkpoint(checkpoint, self._rank.runner.hf_config) as sources:
            adapter.check_names(WeightLoad(self._rank.runner).find_names(set(sources)))
            for name, source in sources.items():
                adapter.merge(name, source)  # it reads an embedding or a head at most

    def adapt(self, checkpoint: Path, folder: str | None) -> int:
        """Read again what the last adapter has changed and what the next one changes, on every rank.

        If this fails, the engine is closed.

        Args:
            checkpoint: the model's folder.
            folder: the adapter's, which `check_adapter` has checked; None for the model as it was loaded.

        Returns:
            The bytes of the checkpoint's tensors that were read.
        """
        self._command({"do": "adapt", "checkpoint": str(checkpoint), "folder": folder})
        return self._rank.num_read_bytes

    def _forget_prefixes(self) -> None:
        with self._claim.work():
            self._engine.scheduler.block_manager.forget_all()


def list_pairs(named_tensors: Any) -> list[tuple[str, Tensor]]:
    """Return the pairs of a name and a tensor; ValueError for anything else. `WeightLoad.check` checks the tensors."""
    is_iterable = isinstance(named_tensors, Iterable) and not isinstance(named_tensors, (str, Mapping))
    pairs = list(named_tensors) if is_iterable else [named_tensors]
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(
                f"load_weights got {quote(pair)}; it must get pairs of a name and a tensor, such as tensors.items()"
            )
    return pairs


class RankRenewal:
    """The part of one rank: it runs the commands that `Renewal` sends to all of them."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.num_read_bytes = 0
        """The bytes of the checkpoint's tensors that the last "adapt" has read; several ranks read them together."""
        self._load: WeightLoad | None = None
        self._adapted = frozenset[str]()
        """The names of the matrices that the present adapter changes."""

    @property
    def load(self) -> "WeightLoad":
        """The load that has begun, or a new one."""
        if self._load is None:
            self._load = WeightLoad(self.runner)
        return self._load

    def forget_load(self) -> None:
        """Let the next load be a new one."""
        self._load = None

    def run(self, command: Command, tensor: Tensor | None) -> None:
        """Run one command.

        Args:
            tensor: the whole tensor of a "write". This rank takes its share.
        """
        runners = [runner for runner in (self.runner, self.runner.draft) if runner is not None]
        match command["do"]:
            case "write":
                assert tensor is not None
                self.load.write(command["name"], tensor)
            case "adapt":
                self._adapt(Path(command["checkpoint"]), command["folder"])
                self.run({"do": "forget"}, None)
            case "renew":
                if self.load.has_written:
                    self.runner.steps.renew()
                self.runner.backend.synchronize()  # the next step may come from another thread's stream
            case "forget":
                self.run({"do": "renew"}, None)
                self.forget_load()
            case "sleep":
                for runner in runners:
                    runner.free_cache()
                    if command["level"] == 2:
                        runner.free_model()
                self.runner.backend.release_memory()
            case "wake_up":
                for runner in runners if command["level"] == 2 else ():
                    runner.load_model()
                self.runner.fill_cache(command["num_blocks"])

    def _adapt(self, checkpoint: Path, folder: str | None) -> None:
        """Read modules from the checkpoint again, with an adapter or without one, one module after another."""
        adapter = None if folder is None else Adapter(folder)
        names = frozenset[str]() if adapter is None else adapter.names
        self.num_read_bytes = 0
        with open_checkpoint(checkpoint, self.runner.hf_config) as sources:
            for name in self.load.find_parts(set(sources), self._adapted | names):
                source = sources[name]
                self.num_read_bytes += math.prod(source.get_shape()) * int(source.get_dtype().strip("BF")) // 8
                self.load.write(name, source if adapter is None else adapter.merge(name, source))
        self._adapted = names


@dataclass
class NewModule:
    """Gathers what one load brings to a module.

    Attributes:
        needed: the names of all tensors that fill the module.
        come: those of them that have come, until the module is replaced.
        staged: {name of a parameter: its new values}, for the parameters of which a part has come.
        is_replaced: whether this load has replaced the module.
    """

    needed: set[str] = field(default_factory=set)
    come: set[str] = field(default_factory=set)
    staged: dict[str, Tensor] = field(default_factory=dict)
    is_replaced: bool = False


class WeightLoad:
    """One load of new weights. A module (a layer with its fused matrices) is replaced once all of its parts have come.

    The real weights may be packed, so shapes and places come from a model without memory, on torch's meta device. A
    module's parts are gathered in memory of their own. In a pipeline that model has the layers of all stages. So each
    stage knows which modules are complete, and replaces those that it has.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        every_layer = Parallel(runner.parallel.rank, runner.parallel.size)
        with torch.device("meta"), default_dtype(runner.dtype):
            self._shapes = find_decoder(runner.hf_config)(runner.hf_config, runner.backend, every_layer)
        self._unread = find_family(runner.hf_config).unread
        self._head, self._embedding = find_ends(runner.hf_config)
        self._filling = None if runner.quantizer is None else runner.quantizer.begin(self._shapes, attaches=False)
        """Gathers the codes of quantised matrices; None if the model has none."""
        self._modules: dict[str, NewModule] = {}
        """{path: module}, for all that have weights of their own."""
        self._places: dict[str, list[tuple[str, WeightTarget]]] = {}
        """{name of a tensor: [(path of a module, the place in it)]}."""
        self._digests: dict[str, str] = {}
        """{name: digest} of the LM head and the embedding that have come, if the model has them tied."""

    @property
    def has_written(self) -> bool:
        """Whether this load has replaced a module."""
        return any(module.is_replaced for module in self._modules.values())

    @property
    def is_whole(self) -> bool:
        """Whether this load has replaced the whole model, and nothing is gathered."""
        modules = self._modules.values()
        return all(module.is_replaced and not module.come for module in modules) and not self._lacks_embedding

    @property
    def _lacks_embedding(self) -> bool:
        """Whether the LM head of a tied model has come alone, so that nobody knows whether it is the same matrix."""
        return self._head in self._digests and self._embedding not in self._digests

    def check(self, tensors: list[tuple[str, Tensor]], is_last: bool) -> dict[str, list[tuple[str, WeightTarget]]]:
        """Check the names and shapes of a call's tensors.

        Args:
            is_last: whether no other call belongs to this load.

        Returns:
            {canonical name: [(path of the module, where the tensor goes)]}.

        Raises:
            ValueError: a name is unknown or comes twice, or a tensor has another shape or no floating-point values.
        """
        canonical = name_canonically((name for name, _ in tensors), self._runner.hf_config)
        if len(canonical) < len(tensors):
            raise ValueError("load_weights got two tensors with the same name")
        names = set(canonical.values())
        self._find_places(names)
        targets = self._places
        ignored = {self._head} if self._shapes.tied else set()
        ignored |= {name for name in names if name.startswith(self._unread)}
        if unknown := names - targets.keys() - ignored:
            raise ValueError(f"the model has no weights called {name_some(unknown)}")
        for name, tensor in tensors:
            for _, target in targets.get(canonical[name], ()):
                if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_meta:
                    raise ValueError(f"{name} is {quote(tensor)}; it must be a tensor of floating-point numbers")
                if not target.fits(tensor.shape):
                    raise ValueError(f"{name} has shape {list(tensor.shape)}; the model has {list(target.shape)}")
        if self._shapes.tied and not is_headless(self._runner.hf_config):
            self._check_head({canonical[name]: tensor for name, tensor in tensors}, is_last)
        return {name: targets.get(name, []) for name in names}

    def _check_head(self, tensors: Mapping[str, Tensor], is_last: bool) -> None:
        """Raise a ValueError for an LM head with other values than the embedding, which may come in another call."""
        may_differ = not is_last or self._head in tensors or self._head in self._digests
        ends = [name for name in (self._head, self._embedding) if may_differ and name in tensors]
        earlier = self._digests
        if self.is_whole and not earlier.keys().isdisjoint(ends):
            earlier = {}  # the whole model comes once more
        digests = earlier | {name: digest_values(tensors[name]) for name in ends}
        if len(set(digests.values())) > 1:
            raise ValueError(
                f"{self._head} has other values than {self._embedding}, and this engine's model has one matrix for "
                'both: make the engine from a folder whose config.json says "tie_word_embeddings": false, such as one '
                "that the trainer has saved"
            )
        self._digests = digests

    def _find_places(self, names: set[str]) -> None:
        """Find where each tensor of the model goes. The names that have come show in which form experts are stored."""
        names = names.union(*(module.come for module in self._modules.values()))
        self._places.clear()
        for module in self._modules.values():
            module.needed.clear()
        filling = self._filling
        found = find_module_targets(self._shapes, names) if filling is None else filling.find_targets(names)
        for path, name, target in found:
            self._places.setdefault(name, []).append((path, target))
            self._modules.setdefault(path, NewModule()).needed.add(name)

    def find_lacking(self, names: Collection[str]) -> str | None:
        """Return what is lacking once the tensors of these names have come, as a sentence; None if nothing is."""
        come = set(names).union(*(module.come for module in self._modules.values()))
        begun = {path for name in come for path, _ in self._places.get(name, ())}
        lacking = {name for path in begun for name in self._modules[path].needed} - come
        if self._lacks_embedding:
            lacking.add(self._embedding)
        if not lacking:
            return None
        return (
            f"the load is not complete: {name_some(lacking)} must come, too, in the same call; or give finish=False to "
            "each call but the last one"
        )

    def find_names(self, names: set[str]) -> set[str]:
        """Return the names of the tensors that the model reads, or leaves unread, of a checkpoint with these names."""
        self._find_places(names)
        return self._places.keys() | {name for name in names if name.startswith(self._unread)}

    def find_parts(self, names: set[str], changed: Collection[str]) -> list[str]:
        """Return the names of all tensors that fill the modules of the `changed` ones: each module's one after another.

        Args:
            names: the names of all tensors of the checkpoint.
        """
        self._find_places(names)
        paths = {path for name in changed for path, _ in self._places.get(name, ())}
        return [name for path in sorted(paths) for name in sorted(self._modules[path].needed)]

    @torch.no_grad()
    def write(self, name: str, tensor: Any) -> None:
        """Write one checked tensor, and replace every module that has all of its parts now.

        Args:
            name: its canonical name.
            tensor: the whole tensor, or a slice object of safetensors.
        """
        if name not in self._places:  # on a follower, which has not checked the names
            self._find_places({name})
        is_mine = not name.startswith(find_elsewhere(self._runner.model))
        for path, target in self._places[name]:
            if is_mine:
                self._gather(path, target, tensor)
            self._modules[path].come.add(name)
        for path in {path for path, _ in self._places[name]}:
            module = self._modules[path]
            if module.come == module.needed:
                module.come.clear()
                module.is_replaced = True
                if is_mine:
                    self._replace(path)

    def _gather(self, path: str, target: WeightTarget, tensor: Any) -> None:
        """Copy a part of a module to the memory where the parameter that it belongs to is gathered."""
        if self._filling is not None and self._filling.has_codes(path, target.view):
            target.fill(tensor, Tensor.copy_)
            return
        staged = self._modules[path].staged
        name, shape = self._find_parameter(path, target.view)
        if name not in staged:
            staged[name] = torch.zeros_like(shape, device=self._runner.device)
            self._runner.backend.prepare_weights([staged[name]])
        view = target.view
        place = staged[name].as_strided(view.size(), view.stride(), view.storage_offset())
        replace(target, view=place).fill(tensor, Tensor.copy_)

    def _find_parameter(self, path: str, view: Tensor) -> tuple[str, Tensor]:
        """Return the parameter of a module that a view shows a part of, with its name; it is on the meta device."""
        whole = view if view._base is None else view._base
        parameters = self._shapes.get_submodule(path).named_parameters(recurse=False)
        return next((name, parameter) for name, parameter in parameters if parameter is whole)

    def _take_staged(self, path: str) -> dict[str, Tensor]:
        """Return a module's new parameters. RuntimeError unless the tensors that have come cover all of each one."""
        module = self._modules[path]
        covered: dict[str, int] = {}
        for view in (target.view for name in module.needed for where, target in self._places[name] if where == path):
            name, shape = self._find_parameter(path, view)
            covered[name] = covered.get(name, getattr(shape, "padding", 0)) + view.numel()
        staged = module.staged
        module.staged = {}
        for name, values in staged.items():
            if covered[name] != values.numel():
                raise RuntimeError(f"tensors cover {covered[name]} of the {values.numel()} elements of {path}.{name}")
        return staged

    def _replace(self, path: str) -> None:
        """Put a module's new parameters in the place of the old ones, and pack them if those were packed."""
        staged = self._take_staged(path)
        model = self._runner.model
        module = model.get_submodule(path)
        owners = [module]  # of the same weight
        if model.tied and module is model.embed_tokens:
            owners.append(model.lm_head)
        matrices = [owner for owner in owners if isinstance(owner, MatrixModule)]
        is_packed = "weight" in staged and any(matrix.packed is not None for matrix in matrices)
        if is_packed:
            weight = nn.Parameter(staged.pop("weight"), requires_grad=False)
            for matrix in matrices:
                matrix.packed = None
                matrix.weight = weight
        for name, values in staged.items():
            module.get_parameter(name).copy_(values)
        if self._filling is not None and self._filling.is_quantized(path):
            self._filling.attach(path, module, model)
        elif is_packed or not matrices:  # experts are packed in place
            self._runner.backend.pack_weights(owners)


def digest_values(tensor: Tensor) -> str:
    """Return a digest of a tensor's shape and values, whatever its number format."""
    digest = xxhash.xxh3_128(str(tuple(tensor.shape)).encode())
    for part in tensor.split(ROWS_AT_A_TIME):  # type: ignore[no-untyped-call]
        values = part.detach().double().cpu() + 0.0  # -0.0 + 0.0 is 0.0, its equal
        digest.update(values.contiguous().numpy().data)
    return digest.hexdigest()


@contextmanager
def open_checkpoint(folder: Path, config: "PretrainedConfig") -> Iterator[dict[str, Any]]:
    """Open a checkpoint's files, and yield {canonical name of a tensor: its slice object}. ValueError if one is bad.

    Args:
        config: the model's configuration.
    """
    with ExitStack() as stack:
        sources: dict[str, Any] = {}
        model = ModelFolder(folder)
        for path in model.files:
            file = stack.enter_context(model.open_tensors(path))
            sources |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a dict
        names = name_canonically(sources, config)
        yield {names[name]: source for name, source in sources.items()}
