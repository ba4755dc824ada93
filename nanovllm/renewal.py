"""New weights in a running engine, and an engine that sleeps: for reinforcement learning, and for many checkpoints."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.layers.linear import MatrixModule
from nanovllm.layers.weights import WeightTarget
from nanovllm.models.decoder import Decoder
from nanovllm.models.loader import name_canonically, name_some
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.startup import fill_cache
from nanovllm.utils.checks import as_bool, quote, refuse
from nanovllm.utils.machine import default_dtype

LOADING = "new weights are being loaded: call load_weights() with finish=True first"
ASLEEP = "the engine is asleep: call wake_up() first"
REPLACED = "the weights that load_weights() had brought were freed by sleep(level=2): call load_weights() again first"


class Renewal:
    """Replaces the weights of an engine, and frees and restores its memory. `LLM` has a method for each of these."""

    def __init__(self, engine: LLMEngine) -> None:
        if not isinstance(engine.runner, ModelRunner):
            raise RuntimeError("new weights and sleep are for engines of one rank: make another engine instead")
        self._engine = engine
        self._runner = engine.runner
        self._level = 0
        """The level of the sleep; 0 while the engine is awake."""
        self._num_blocks = engine.scheduler.block_manager.num_blocks
        self._has_new_weights = False
        self._load: WeightLoad | None = None
        """The load that a call with finish=False has begun."""

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], finish: bool) -> None:
        """Replace weights: see `LLM.load_weights`."""
        as_bool(finish, "finish")
        engine = self._engine
        if engine.refusal not in (None, LOADING, REPLACED):
            raise RuntimeError(engine.refusal)
        awaited = engine.refusal
        engine.refusal = None
        try:
            engine.check_idle()
        finally:
            engine.refusal = awaited
        tensors = list(named_tensors)
        load = self._load or WeightLoad(self._runner)
        targets = load.check(tensors)
        if finish and (lacking := load.find_lacking(targets)):
            if not load.has_written:
                self._load = None
                engine.refusal = None if awaited == LOADING else awaited
                raise ValueError(lacking)
            engine.close()
            raise ValueError(f"{lacking}; the engine is closed, because other weights were replaced already")
        try:
            load.write(tensors, targets)
        except BaseException:
            if load.has_written:
                engine.close()
            raise
        engine.scheduler.block_manager.forget_all()
        self._load = None if finish else load
        self._has_new_weights = self._has_new_weights or load.has_written
        engine.refusal = None if finish else LOADING

    def sleep(self, level: int) -> None:
        """Free memory: see `LLM.sleep`."""
        if level not in (1, 2) or isinstance(level, bool):
            raise refuse(level, "level", "1 (frees the KV cache) or 2 (frees the weights, too)")
        self._engine.check_idle()
        self._engine.scheduler.block_manager.forget_all()
        for runner in self._runners():
            if runner.graphs is not None:
                runner.graphs.release()
                runner.graphs = None
            runner.caches = []
            if level == 2:
                runner.free_model()
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()
        self._level = level
        self._engine.refusal = ASLEEP

    def wake_up(self) -> None:
        """Take the memory again: see `LLM.wake_up`."""
        if self._engine.closed:
            raise RuntimeError("the engine is closed")
        if not self._level:
            return
        if self._level == 2:
            for runner in self._runners():
                runner.load_model()
        fill_cache(self._runner, self._num_blocks)
        self._engine.refusal = REPLACED if self._level == 2 and self._has_new_weights else None
        self._level = 0

    def _runners(self) -> list[ModelRunner]:
        return [runner for runner in (self._runner, self._runner.draft) if runner is not None]


class WeightLoad:
    """One load of new weights. A module (a layer with its fused matrices) is replaced once all of its parts have come.

    The real weights may be packed, so shapes and places come from a model without memory, on torch's meta device. A
    module's parts are gathered in memory of their own.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.has_written = False
        self._runner = runner
        with torch.device("meta"), default_dtype(runner.dtype):
            self._shapes = Decoder(runner.hf_config, runner.backend, runner.parallel, runner.config.max_model_len)
        self._staged: dict[str, dict[str, Tensor]] = {}
        """{path of a module: {name of a parameter: its new values}}, for modules that lack parts."""
        self._come: dict[str, set[str]] = {}
        """{path of a module: names of the tensors that have come}, for modules that lack parts."""
        self._needed: dict[str, set[str]] = {}
        """{path of a module: names of all tensors that fill it}."""

    def check(self, tensors: list[tuple[str, Tensor]]) -> dict[str, list[tuple[str, WeightTarget]]]:
        """Check the names and shapes of a call's tensors.

        Returns:
            {canonical name: [(path of the module, where the tensor goes)]}.

        Raises:
            ValueError: a name is unknown or comes twice, or a tensor has another shape or no floating-point values.
        """
        canonical = name_canonically(name for name, _ in tensors)
        if len(canonical) < len(tensors):
            raise ValueError("load_weights got two tensors with the same name")
        names = set(canonical.values())
        targets: dict[str, list[tuple[str, WeightTarget]]] = {}
        needed: dict[str, set[str]] = {}
        for path, name, target in self._shapes.module_targets(names.union(*self._come.values())):
            targets.setdefault(name, []).append((path, target))
            needed.setdefault(path, set()).add(name)
        ignored = {"lm_head.weight"} if self._shapes.tied else set()
        if unknown := names - targets.keys() - ignored:
            raise ValueError(f"the model has no weights called {name_some(unknown)}")
        for name, tensor in tensors:
            for _, target in targets.get(canonical[name], ()):
                if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                    raise ValueError(f"{name} is {quote(tensor)}; it must be a tensor of floating-point numbers")
                if tuple(tensor.shape) != target.shape:
                    raise ValueError(f"{name} has shape {list(tensor.shape)}; the model has {list(target.shape)}")
        paths = {path for name in names for path, _ in targets.get(name, ())}
        self._needed |= {path: needed[path] for path in paths}
        return {name: targets.get(name, []) for name in names}

    def find_lacking(self, targets: dict[str, list[tuple[str, WeightTarget]]]) -> str | None:
        """Return what is lacking once the tensors of `targets` have come, as a sentence; None if nothing is."""
        come = {path: set(names) for path, names in self._come.items()}
        for name, places in targets.items():
            for path, _ in places:
                come.setdefault(path, set()).add(name)
        lacking = {name for path, names in come.items() for name in self._needed[path] - names}
        return f"the load is not complete: {name_some(lacking)} must come, too" if lacking else None

    @torch.no_grad()
    def write(self, tensors: list[tuple[str, Tensor]], targets: dict[str, list[tuple[str, WeightTarget]]]) -> None:
        """Write checked tensors, and replace every module that has all of its parts."""
        canonical = name_canonically(name for name, _ in tensors)
        for name, tensor in tensors:
            for path, target in targets[canonical[name]]:
                self._gather(path, target, tensor)
                self._come.setdefault(path, set()).add(canonical[name])
            for path in {path for path, _ in targets[canonical[name]]}:
                if self._come[path] == self._needed[path]:
                    self.has_written = True
                    self._replace(path)

    def _gather(self, path: str, target: WeightTarget, tensor: Tensor) -> None:
        """Copy a part of a module to the memory where the module's new parameters are gathered."""
        shapes = dict(self._shapes.get_submodule(path).named_parameters(recurse=False))
        if path not in self._staged:
            device = self._runner.device
            self._staged[path] = {name: torch.zeros_like(shape, device=device) for name, shape in shapes.items()}
            self._runner.backend.prepare_weights(self._staged[path].values())
        view = target.view
        parameter = view if view._base is None else view._base
        name = next(name for name, shape in shapes.items() if shape is parameter)
        place = self._staged[path][name].as_strided(view.size(), view.stride(), view.storage_offset())
        place.copy_(tensor[target.slices])

    def _replace(self, path: str) -> None:
        """Put a module's new parameters in the place of the old ones, and pack them if those were packed."""
        staged = self._staged.pop(path)
        del self._come[path]
        model = self._runner.model
        module = model.get_submodule(path)
        owners = [module]  # of the same weight
        if model.tied and module is model.embed_tokens:
            owners.append(model.lm_head)
        matrices = [owner for owner in owners if isinstance(owner, MatrixModule)]
        is_packed = any(matrix.packed is not None for matrix in matrices)
        for name, values in staged.items():
            if name == "weight" and is_packed:
                weight = nn.Parameter(values, requires_grad=False)
                for matrix in matrices:
                    matrix.packed = None
                    matrix.weight = weight
            else:
                module.get_parameter(name).copy_(values)
        if is_packed or not matrices:  # experts are packed in place
            self._runner.backend.pack_weights(owners)
