"""Adapters by groups: each request may name a LoRA adapter, and the engine's weights change between the groups.

    group of A -- drained --> read again what A changed and B changes -- group of B -- drained --> ...

The engine has one model at a time, so its steps cost what they cost without adapters. A group that ends leaves its
adapter in the weights. The next activity that names no adapter brings back the model as it was loaded.

The prefix cache stays: `BlockManager.root` is the hash of the adapter's content, so each adapter finds its own blocks.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakMethod, proxy

from nanovllm.engine.admission import SoonestOrder
from nanovllm.engine.interrupt import HoldInterrupt
from nanovllm.engine.llm_engine import OPEN_RUN, LLMEngine
from nanovllm.engine.order import Order
from nanovllm.engine.sequence import Request
from nanovllm.features.adapters.lora import check_files
from nanovllm.features.renewal import Renewal
from nanovllm.inputs import LoRARequest
from nanovllm.models.hub import as_path
from nanovllm.models.model_folder import ModelFolder
from nanovllm.utils.checks import quote, refuse
from nanovllm.utils.digests import digest_adapter

logger = logging.getLogger(__name__)

RUN = OPEN_RUN._replace(name=f"{OPEN_RUN.name} with adapters")
"""A run that changes adapters itself."""


class Named(NamedTuple):
    """An adapter that requests name.

    Attributes:
        folder: its absolute path; "" for the model as it was loaded.
        root: the hash of its content: see `BlockManager.root`.
    """

    folder: str = ""
    root: bytes = b""


BASE = Named()
"""The model as it was loaded."""


class Adapters:
    """Brings adapters into an engine's weights, and out of them. `find_adapters` makes it."""

    def __init__(self, engine: LLMEngine) -> None:
        # Strong references back to the engine would be cycles: `del llm` would not free memory at once.
        self._engine: LLMEngine = proxy(engine)
        self._renewal = Renewal(self._engine)
        self._checked: set[bytes] = set()
        """The hashes of adapters that fit the model."""

    def watch(self) -> None:
        """Have the engine's claim call `_begin` from now on."""
        begin = WeakMethod(self._begin)

        def on_begin(activity: str) -> None:
            if (found := begin()) is not None:
                found(activity)

        self._engine.claim.on_begin = on_begin

    @property
    def root(self) -> bytes:
        """Tells which adapter the weights have: see `BlockManager.root`."""
        return self._engine.scheduler.block_manager.root

    @property
    def _checkpoint(self) -> Path:
        """The model's folder. ValueError if its files are no longer those that were loaded."""
        facts = self._engine.facts
        assert isinstance(facts.origin, Path)
        if ModelFolder(facts.origin).stamps != facts.stamps:
            raise ValueError(
                f"the checkpoint {quote(str(facts.origin))} has changed since it was loaded, and an adapter must be "
                "merged into the same weights: make another engine"
            )
        return facts.origin

    def find(self, folder: str, option: str) -> Named:
        """Return the adapter of a folder. ValueError unless it can be merged into the model; nothing is written.

        Args:
            option: what names the folder, for error messages.
        """
        path = as_path(folder, option).absolute()
        check_files(path, option)
        named = Named(str(path), bytes.fromhex(digest_adapter(path)))
        checkpoint = self._checkpoint
        if named.root not in self._checked:
            self._renewal.check_adapter(checkpoint, named.folder, option)
            self._checked.add(named.root)
        return named

    def change(self, named: Named) -> Iterator[None]:
        """Bring an adapter into the weights. Yield None, which a run takes, until the engine has no sequence left.

        Raises:
            RuntimeError: the content of the adapter is no longer what `find` saw, or it could not be read to its end.
        """
        scheduler = self._engine.scheduler
        while named.root != self.root and (scheduler.waiting or scheduler.running):
            yield None
        if named.root != self.root:
            self._load(named)

    def _begin(self, activity: str) -> None:
        if self.root and activity != RUN.name:
            self._load(BASE)

    def _load(self, named: Named) -> None:
        engine = self._engine
        what = f"the adapter {quote(named.folder)}" if named.folder else "the model without an adapter"
        since = time.perf_counter()
        if named.folder and digest_adapter(named.folder) != named.root.hex():
            raise RuntimeError(f"{what} has changed since its first request was read: leave its files as they are")
        with HoldInterrupt(on_second=engine.close), engine.claim.work():
            engine.abort_all()  # a step without results may be in flight
            try:
                num_bytes = self._renewal.adapt(self._checkpoint, named.folder or None)
                engine.scheduler.block_manager.root = named.root
            except BaseException as error:
                engine.close()
                if not isinstance(error, Exception):
                    raise
                raise RuntimeError(
                    f"{what} could not be read: {error}; the engine is closed, because some weights may be new, and "
                    "others old"
                ) from error
        seconds = time.perf_counter() - since
        logger.info("%s is in the weights: %.2f s, %.1f MB of the checkpoint read", what, seconds, num_bytes / 1e6)


def find_adapters(llm: Any, option: str) -> Adapters:
    """Return what changes an engine's adapters. ValueError if the engine cannot have any.

    Args:
        llm: the `LLM`.
        option: what asks for an adapter, for error messages.
    """
    engine = llm.engine
    config = engine.config
    if config.lora is not None:
        raise refuse(config.lora, "lora", f"left out of the engine's options where requests have {option}")
    if config.data_parallel_size > 1:
        raise refuse(config.data_parallel_size, "data_parallel_size", f"1 where requests have {option}")
    if config.load_format == "dummy" or not isinstance(engine.facts.origin, Path):
        raise ValueError(f'{option} needs a checkpoint to merge an adapter into, and load_format="dummy" reads none')
    hf_config = getattr(engine.runner, "local", engine.runner).hf_config
    if quantized := getattr(hf_config, "quantization_config", None):
        raise ValueError(
            f"{option} names an adapter, and the checkpoint is quantised already ({quantized.get('quant_method')}): an "
            'adapter can be merged only into a checkpoint of 16 or 32 bits; quantization="int8" quantises the merged '
            "weights"
        )
    if llm._renewal.has_new_weights:
        raise ValueError(
            f"{option} names an adapter, which is merged into the checkpoint's weights, and load_weights() has "
            "replaced those: make another engine"
        )
    # `setdefault` is atomic: two threads get the same object, which alone knows what the weights have.
    adapters: Adapters = vars(engine).setdefault("_adapters", Adapters(engine))
    adapters.watch()
    return adapters


def list_folders(lora_request: Any, count: int) -> list[str | None]:
    """Return the adapter's folder of each of `count` requests; None for the model as it was loaded.

    Raises:
        ValueError: `lora_request` is neither one for all requests nor one per request.
    """
    listed = list(lora_request) if isinstance(lora_request, list | tuple) else [lora_request] * count
    if len(listed) != count:
        raise ValueError(f"{len(listed)} lora_requests for {count} prompts; give one for all, or one per prompt")
    for one in listed:
        if not isinstance(one, LoRARequest | None):
            raise refuse(one, "lora_request", "a LoRARequest, None, or a list with one of these per prompt")
    return [None if one is None else one.lora_path for one in listed]


class AdapterOrder(SoonestOrder):
    """Requests by groups, one for each adapter, and each group in the order that ends soonest.

    The group whose adapter the weights have comes first, and the others in the order of their first requests.
    """

    activity = RUN

    def __init__(self, llm: Any, requests: list[Request], folders: list[str | None]) -> None:
        """
        Args:
            llm: the `LLM`.
            folders: the adapter's folder of each request; None for the model as it was loaded.
        """
        super().__init__(llm.engine, requests)
        find_adapters(llm, "lora_request")  # refuses an engine that cannot have any, before the run begins
        self._llm = llm
        self._folders = folders
        self._named: dict[str | None, Named] = {None: BASE}
        self._loaded = b""
        """Tells which adapter the weights have as the run begins."""

    def list_requests(self) -> Iterator[tuple[int, Request] | None]:
        adapters = find_adapters(self._llm, "lora_request")  # again: new weights may have come before the run began
        for folder in filter(None, dict.fromkeys(self._folders)):
            self._named[folder] = adapters.find(folder, "lora_request")
        self._loaded = adapters.root
        for item in super().list_requests():
            assert item is not None
            number, _ = item
            yield from adapters.change(self._named[self._folders[number]])
            yield item

    def find_key(self, number: int) -> object:
        root = self._named[self._folders[number]].root
        return None if root == self._loaded else root


def group_requests(llm: Any, requests: list[Request], lora_request: Any) -> Order:
    """Return the order of requests with adapters.

    Args:
        llm: the `LLM`.
        lora_request: see `LLM.generate`.
    """
    folders = list_folders(lora_request, len(requests))
    return AdapterOrder(llm, requests, folders) if any(folders) else SoonestOrder(llm.engine, requests)
