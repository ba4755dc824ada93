"""Settings that must be made before torch and Triton are imported, and fixtures that several test files share."""

import gc
import importlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from helpers.warm import WarmPython

    from nanovllm import LLM

# On a busy machine examples are drawn slowly, and each may take any time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Models this small are fastest on one thread, and no test may reach for the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Where nobody may keep bytecode, each child would compile the package anew, which takes it half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell gives its background jobs, and so their tests, a SIGINT that is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on the CPU, whatever the machine has, and Triton's kernels in its interpreter: but for `-m gpu`.

    Both are decided before any test is imported: CUDA looks for devices once, and Triton when a kernel is decorated.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take minutes come first: one process runs them while the others do the rest.

    As the last ones they would leave the others idle.
    """
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Python's search for cycles leaves out what is imported, which stays anyway: half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """At the end Triton's bindings would call what is left out a leak."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With -n 2 each process takes half of the tests, in order, and so shares set-up. The first to be done takes more.

    By default each would hold two tests or more, and so a long one near the end could keep another one waiting.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


HANDLERS = list(logging.getLogger("nanovllm").handlers)
LEVEL = logging.getLogger("nanovllm").level


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    """Tests of Triton's kernels import it before the first test runs."""
    if os.environ.get("TRITON_INTERPRET") and "triton.language" in sys.modules:
        from helpers.quick_interpreter import quicken

        quicken()


@pytest.fixture(autouse=True, scope="session")
def steps_are_timed_once() -> None:
    """An engine with drafts times steps for half a second, short ones four times. No token depends on what it finds."""
    if importlib.util.find_spec("nanovllm.features.drafts"):
        patch = pytest.MonkeyPatch()
        patch.setattr("nanovllm.features.drafts.costs.ROUND", 1e-9)
        patch.setattr("nanovllm.features.drafts.costs.LONG", 0)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore the package's log as it was at first: the command adds a handler, which logs to a captured stderr.

    A fixture of a whole file may have run the command before this one begins.
    """
    logger = logging.getLogger("nanovllm")
    logger.handlers[:] = HANDLERS
    logger.setLevel(LEVEL)
    yield
    logger.handlers[:] = HANDLERS
    logger.setLevel(LEVEL)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen3 whose likeliest tokens are clear, without tokenizer or end-of-sequence ids."""
    from helpers.tiny import save_random

    folder = tmp_path_factory.mktemp("random")
    save_random(folder)
    return folder


@pytest.fixture(scope="module")
def open_llm(random_model: Path) -> Iterator[Callable[..., "LLM"]]:
    """Makes small engines, by default of `random_model`; options are added to `tiny.SMALL`.

    They are closed after the last test of the file.
    """
    from helpers.tiny import SMALL

    from nanovllm import LLM

    with ExitStack() as opened:
        yield lambda model=random_model, **options: opened.enter_context(LLM(model, **SMALL | options))


@pytest.fixture(scope="module")
def llm(open_llm: Callable[..., "LLM"]) -> "LLM":
    """A small engine."""
    return open_llm()


@pytest.fixture(scope="session")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and its tokenizer, that recites the alphabet: see tiny.save_reciter."""
    from helpers.tiny import save_reciter

    folder = tmp_path_factory.mktemp("reciter")
    save_reciter(folder)
    return folder


@pytest.fixture(scope="session")
def warm_python() -> Iterator["WarmPython"]:
    """Runs scripts in children of a process that has imported torch: see helpers/warm.py."""
    from helpers.warm import WarmPython

    warm = WarmPython()
    yield warm
    warm.close()


@pytest.fixture
def local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and stages of engines are in this process: see helpers/local_ranks.py."""
    from helpers.local_ranks import lead_local

    monkeypatch.setattr("nanovllm.features.distributed.leader.LeadingRunner", lead_local)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium. Where there is none the tests skip, unless NANOVLLM_TEST_BROWSER asks for it."""
    from helpers.window import start_browser

    required = bool(os.environ.get("NANOVLLM_TEST_BROWSER"))
    if not required:
        pytest.importorskip("selenium")
    try:
        driver = start_browser()
    except FileNotFoundError as missing:
        pytest.fail(str(missing)) if required else pytest.skip(str(missing))
    yield driver
    driver.quit()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in in this process, which is without it afterwards."""
    from nanovllm.apps.standin.finders import FINDER

    monkeypatch.setattr(sys, "meta_path", [FINDER, *sys.meta_path])
    yield importlib.import_module("vllm")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
