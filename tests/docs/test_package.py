"""The package as it is found: what importing it costs, what it needs, and how it gets a model from a hub."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT
from helpers.warm import WarmPython

from nanovllm.backends import find_backend
from scripts.check_code import (
    APPLICATIONS,
    DEVICES,
    FAMILIES,
    FEATURES,
    find_modules,
    find_place,
    find_ring,
    find_spine,
)

CPU = torch.device("cpu")
HEAVY = ("torch", "triton", "flash_attn", "transformers", "numpy", "tokenizers", "huggingface_hub")


def python(code: str, *arguments: str, options: Sequence[str] = (), **environment: str) -> str:
    """Return what a fresh interpreter prints; a failure shows its stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *options, "-c", code, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, nanovllm; nanovllm.SamplingParams(); print(*sys.modules)"
    assert set(python(code).split()) & set(HEAVY) == set()


def test_importing_the_package_leaves_pythons_finders_alone() -> None:
    code = "import sys; before = [*sys.meta_path, *sys.path_hooks]; import nanovllm; "
    assert python(code + "print(before == [*sys.meta_path, *sys.path_hooks])") == "True"


MODULES = find_modules(ROOT / "nanovllm")


def test_planning_needs_no_torch() -> None:
    modules = ", ".join(name for name in MODULES if name.startswith("nanovllm.engine"))
    python(f"import sys; sys.modules['torch'] = None; import {modules}")  # None: importing it is an ImportError


def feature_of(module: str) -> str | None:
    """The feature, the device or the application that a module belongs to; None for the spine's."""
    place = find_place(module)
    is_outer = find_ring(place) in (FAMILIES, FEATURES, DEVICES, APPLICATIONS) and module != "nanovllm"
    return "/".join(place.split("/")[:2]) if is_outer else None


def test_the_spine_loads_no_feature_and_no_device() -> None:
    assert {module: found for module in find_spine(MODULES) if (found := feature_of(module))} == {}


TABLES = ("backends", "backends/base", "models/decoder", "models/model_config", "load")
"""The files that import by name: the classes of backends, operators, and families."""


def test_only_tables_import_by_name() -> None:
    for module, path in MODULES.items():
        if feature_of(module) is None and find_place(module) not in TABLES:
            source = path.read_text()
            assert not re.search(r"import_module|__import__|resolve_name", source), module


GENERATE = """
import sys
from nanovllm import LLM, SamplingParams

with LLM("tiny-qwen3", device="cpu", attention_backend=sys.argv[1], max_model_len=64) as llm:
    llm.generate([[5]], SamplingParams(1.0, 2), use_tqdm=False)
print(*(name for name in sys.modules if name.startswith("nanovllm.")))
"""


@pytest.mark.slow
def test_a_process_loads_the_device_that_it_has_chosen_and_no_feature(warm_python: WarmPython) -> None:
    """By the package's own modules that are there after `generate`."""
    loaded: dict[str, set[str]] = {"torch": set(), "cpu": {"backends/cpu"}, "triton": {"backends/gpu"}}
    for backend, expected in loaded.items():
        if find_backend(backend, CPU).why_cannot(CPU) is None:  # type: ignore[union-attr]
            done = warm_python.run(GENERATE, backend, cwd=ROOT)
            assert done.returncode == 0, done.stderr
            assert {found for module in done.stdout.split() if (found := feature_of(module))} == expected, backend


def test_the_version_is_known_from_source_without_installation() -> None:
    """No site-packages, so no metadata of an installed distribution either."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import nanovllm; print(nanovllm.__version__)"
    version = python(code, options=["-I", "-S"])
    assert version.count(".") >= 1
    assert version in (ROOT / "nanovllm" / "version.py").read_text()


def test_no_message_asks_for_this_package_by_a_name_that_a_registry_may_have_from_others() -> None:
    for path in (*MODULES.values(), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"):
        assert not re.search(r"nano-vllm\[|pip install '?nano", path.read_text()), path


def test_names_that_do_not_exist_are_attribute_errors() -> None:
    import nanovllm

    with pytest.raises(AttributeError, match="LLMM"):
        nanovllm.LLMM  # noqa: B018
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name) is not None
    assert {"LLM", "SamplingParams", "Output", "Completion", "RequestOutput", "__version__"} <= set(nanovllm.__all__)


# ---- a hub

REPOSITORY = "someone/reciter"
UNWANTED = {
    "pytorch_model.bin": b"x" * 1000,
    "model.gguf": b"x" * 1000,
    "onnx/model.onnx": b"x" * 1000,
    "original/consolidated.00.pth": b"x" * 1000,
    "README.md": b"# A model",
    "image.png": b"x",
}


class FakeHub(ThreadingHTTPServer):
    """As much of the Hugging Face hub's protocol as a download takes, and a log of the files that were asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.files = files
        self.asked: set[str] = set()
        self.commit = hashlib.sha1(b"commit").hexdigest()


class FakeHubHandler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        path = self.path.split("?")[0]
        api = f"/api/models/{REPOSITORY}"
        resolve = f"/{REPOSITORY}/resolve/"
        if path.startswith(f"{api}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in hub.files]
            self.answer(json.dumps({"id": REPOSITORY, "sha": hub.commit, "siblings": siblings}).encode())
        elif path.startswith(resolve) and (name := path.removeprefix(resolve).split("/", 1)[1]) in hub.files:
            hub.asked.add(name)
            data = hub.files[name]
            self.answer(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": hub.commit})
        else:
            self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404)

    def answer(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(reciter: Path) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in reciter.iterdir()}
    files |= {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "2_Dense/config.json": b"{}"}
    files |= {"sentence_bert_config.json": b"{}", "config_sentence_transformers.json": b"{}"}
    hub = FakeHub(files | UNWANTED)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


FROM_HUB = f"""
import sys
sys.modules["triton"] = sys.modules["flash_attn"] = None  # importing them raises ImportError
from nanovllm import LLM, SamplingParams
llm = LLM({REPOSITORY!r}, device="cpu", max_model_len=64)
print(llm.generate("a", SamplingParams(temperature=0), use_tqdm=False)[0]["text"])
try:
    LLM("someone/nothing")
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_hub_id_is_downloaded_safetensors_configs_and_tokenizer_only(hub: FakeHub, tmp_path: Path) -> None:
    """On a machine without Triton and flash-attn at that: a CPU needs neither, nor NCCL for one rank."""
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    text, error = python(FROM_HUB, **place).split("\n", 1)
    assert text == "bcdefghijklménopqrstuvwxyz"
    assert "someone/nothing" in error
    wanted = hub.files.keys() - UNWANTED.keys()
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= wanted
    assert hub.asked == wanted


def test_a_model_is_made_on_its_device_entirely() -> None:
    """On a device that holds nothing: a table left on the CPU would be seen only where there is a GPU."""
    from transformers import Qwen3Config

    from nanovllm.backends.torch_backend import TorchBackend
    from nanovllm.models.decoder import Decoder
    from nanovllm.models.layers.parallel import Parallel

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**shape, head_dim=32)
    with torch.device("meta"):
        model = Decoder(config, TorchBackend(), Parallel())
        model.fill_tables(config, 128, torch.device("meta"))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {name for name, tensor in tensors.items() if tensor.device.type != "meta"} == set()


def test_a_type_checker_knows_every_option_and_its_type() -> None:
    from dataclasses import fields

    from nanovllm.config import EngineConfig, EngineOptions

    options = {field.name: field.type for field in fields(EngineConfig) if field.name != "model"}
    assert EngineOptions.__annotations__ == options


ONE_ANSWER = """
import nanovllm
from nanovllm import LLM, SamplingParams

print(nanovllm.__file__)
print(LLM("tiny-qwen3").generate("1, 2, 3,", SamplingParams(temperature=0.0, max_tokens=3))[0]["token_ids"])
"""
BUILD = """
import sys
from setuptools import build_meta

print(build_meta.build_sdist(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_wheel_of_the_source_archive_holds_every_file_of_the_package_and_runs_elsewhere(tmp_path: Path) -> None:
    """C++ sources, the built-in model, the page of the window and py.typed among them. Needs setuptools."""
    source = tmp_path / "source"
    built = tmp_path / "built"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "nanovllm", source / "nanovllm", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    (source / "tests" / "test_nothing.py").touch()
    archive = subprocess.run([sys.executable, "-c", BUILD, built], capture_output=True, text=True, cwd=source)
    if "No module named 'setuptools'" in archive.stderr:
        pytest.skip("setuptools is not installed")
    assert archive.returncode == 0, archive.stderr
    wheels = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", built / "wheels"]
    done = subprocess.run([*wheels, built / archive.stdout.split()[-1]], capture_output=True, text=True)
    if done.returncode and "setuptools" in done.stderr:
        pytest.skip("setuptools cannot be had")
    assert done.returncode == 0, done.stderr
    (wheel,) = (built / "wheels").iterdir()
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = source / "nanovllm"
    assert packed == {str(path.relative_to(source)) for path in package.rglob("*") if path.is_file()}
    for name in ("py.typed", "apps/view/page.js", "backends/cpu/kernels.cpp", "assets/tiny-qwen3/model.safetensors"):
        assert f"nanovllm/{name}" in packed
    place = tmp_path / "elsewhere"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, wheel]
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(place)}
    run = subprocess.run(
        [sys.executable, "-c", ONE_ANSWER], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    where, token_ids = run.stdout.splitlines()
    assert Path(where).is_relative_to(place) and len(json.loads(token_ids)) == 3


USES = """
from nanovllm import LLM, SamplingParams

outputs = LLM("tiny-qwen3", max_num_seqs=4).generate("a", SamplingParams(0.5, 3))
reveal_type(outputs[0].outputs[0].text)
LLM("tiny-qwen3", max_num_seqs="4")
SamplingParams(temprature=1.0)
"""


@pytest.mark.slow
def test_a_type_checker_finds_the_package_as_it_is_installed_for_work(tmp_path: Path) -> None:
    """It does not run the hooks that an editable install may be made of; needs the network for setuptools."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    interpreter = tmp_path / "venv" / "bin" / "python"
    uses = tmp_path / "uses.py"
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter)]
    install = [*pip, "install", "--quiet", "--no-deps", "--editable", ROOT]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode and "setuptools" in done.stderr:
        pytest.skip("setuptools cannot be had")
    assert done.returncode == 0, done.stderr
    uses.write_text(USES)
    check = [sys.executable, "-m", "mypy", "--python-executable", interpreter, "--cache-dir", tmp_path, uses]
    shown = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True).stdout
    assert 'Revealed type is "str"' in shown
    assert 'expected "int | None"' in shown
    assert "temprature" in shown
    assert "Found 2 errors" in shown
