"""Where a model in GGUF is found: a file, the one in a folder, one of several quantisations of a repository."""

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from helpers.gguf_models import save_gguf
from helpers.tiny import SMALL, save_random

from nanovllm import LLM
from nanovllm.features.gguf.files import choose_on_hub, find_gguf

pytest.importorskip("gguf")

OPTIONS = SMALL | {"device": "cpu", "attention_backend": "torch"}


def fail(model: object, **options: Any) -> str:
    """Return the message of the ValueError that loading the model raises."""
    with pytest.raises(ValueError) as caught:
        LLM(str(model), **OPTIONS | options).close()
    return str(caught.value)


def test_a_folder_with_one_model_is_that_model(tmp_path: Path) -> None:
    """Files for pictures do not count, nor do the parts of a split file, of which any may be named."""
    (tmp_path / "mmproj-model-f16.gguf").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    for number in (1, 2, 3):
        (tmp_path / f"model-Q8_0-{number:05d}-of-00003.gguf").write_bytes(b"")
    assert find_gguf(str(tmp_path)).path == tmp_path / "model-Q8_0-00001-of-00003.gguf"


def test_a_folder_with_several_models_names_them(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"")
    assert "has 2 models in GGUF; name one of these files: a-Q4_0.gguf, a-Q8_0.gguf" in fail(tmp_path)


def test_safetensors_come_before_a_gguf_file(tmp_path: Path) -> None:
    save_random(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"damaged")
    LLM(str(tmp_path), **OPTIONS).close()


def test_a_file_is_known_by_its_first_bytes_too(tmp_path: Path) -> None:
    save_gguf(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").rename(tmp_path / "blob")
    LLM(tmp_path / "blob", **OPTIONS).close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GGUF" + bytes(100), "the version of the format is 0"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a GGUF file.*model.gguf is a git-lfs pointer"),
        (None, "does not exist"),
    ],
)
def test_what_is_no_model_in_gguf_is_refused_by_what_it_is(tmp_path: Path, data: bytes | None, words: str) -> None:
    if data is not None:
        (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        LLM(tmp_path / "model.gguf", **OPTIONS)


NAMES = ["x-IQ4_XS.gguf", "x-Q4_K_M.gguf", "x-Q4_K_S.gguf", "x-Q8_0-00001-of-00002.gguf", "x-Q8_0-00002-of-00002.gguf"]
FOLDERS = [f"{kind}/x-{kind}-{number:05d}-of-00002.gguf" for kind in ("BF16", "UD-Q4_K_XL") for number in (1, 2)]


@pytest.mark.parametrize(
    ("names", "asked", "found"),
    [
        (NAMES, None, "x-Q4_K_M.gguf"),
        (NAMES, "q4_k_s", "x-Q4_K_S.gguf"),
        (NAMES, "Q8_0", "x-Q8_0-00001-of-00002.gguf"),
        (NAMES[:1], None, "x-IQ4_XS.gguf"),
        (["mmproj-x-Q4_K_M.gguf", "x-Q4_K_M.gguf", "README.md"], None, "x-Q4_K_M.gguf"),
        (FOLDERS, "UD-Q4_K_XL", "UD-Q4_K_XL/x-UD-Q4_K_XL-00001-of-00002.gguf"),
        (["x.Q4_K_M.gguf", "x.Q4_0.gguf"], "Q4_0", "x.Q4_0.gguf"),
        (NAMES, "x-Q4_K_S.gguf", "x-Q4_K_S.gguf"),
        (NAMES, "x-Q8_0-00002-of-00002.gguf", "x-Q8_0-00001-of-00002.gguf"),
        (FOLDERS, "BF16/x-BF16-00002-of-00002.gguf", "BF16/x-BF16-00001-of-00002.gguf"),
    ],
)
def test_a_quantisation_behind_a_colon_chooses_a_file(names: list[str], asked: str | None, found: str) -> None:
    assert choose_on_hub(names, asked, "owner/name") == found


@pytest.mark.parametrize(
    ("names", "asked", "words"),
    [
        (NAMES[2:], None, "has 2 models in GGUF.*x-Q4_K_S.gguf, x-Q8_0-00001-of-00002.gguf"),
        (NAMES, "Q5_K_M", "has 0 files of Q5_K_M; .*x-IQ4_XS.gguf, x-Q4_K_M.gguf"),
        (NAMES, "Q4", "has 0 files of Q4"),
        (["x-Q4_0.gguf", "y-Q4_0.gguf"], "Q4_0", "has 2 files of Q4_0"),
        ([], None, "has 0 models in GGUF"),
    ],
)
def test_a_repository_without_a_choice_lists_its_files(names: list[str], asked: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_on_hub(names, asked, "owner/name")


def test_an_id_is_found_in_the_cache_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    commit = "0123abcd" * 5
    repository = tmp_path / "models--owner--name-GGUF"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    save_gguf(snapshot / "name-Q8_0.gguf", types="Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for model in ("owner/name-GGUF:Q8_0", "owner/name-GGUF"):
        LLM(model, **OPTIONS).close()
    assert "has 0 files of Q4_K_M" in fail("owner/name-GGUF:Q4_K_M")
    assert "neither a local GGUF file, nor one that could be downloaded" in fail("owner/other:Q8_0")


COMMIT = "0123abcd" * 5


class FakeHub(BaseHTTPRequestHandler):
    """Answers what huggingface_hub asks of a hub: the repository owner/name, and the bytes of its files."""

    files: ClassVar[dict[str, bytes]] = {}
    sent: ClassVar[list[str]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        headers = {"X-Repo-Commit": COMMIT}
        data = None
        if path.startswith("/api/models/owner/name/tree/"):
            sizes = {name: len(content) for name, content in self.files.items()}
            data = json.dumps(
                [{"type": "file", "path": n, "size": size, "oid": n} for n, size in sizes.items()]
            ).encode()
        elif path.startswith("/api/models/owner/name/revision/main") or path == "/api/models/owner/name":
            siblings = [{"rfilename": name} for name in self.files]
            data = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith(f"/owner/name/resolve/{COMMIT}/"):
            name = path.partition(f"{COMMIT}/")[2]
            data = self.files[name]
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
            if self.command == "GET":
                self.sent.append(name)
        self.send_response(404 if data is None else 200)
        if data is None:
            headers["X-Error-Code"] = "RepoNotFound"
            data = b""
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A hub on this machine, with the files of `FakeHub`, and an empty cache."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(FakeHub, "sent", [])
    yield server
    server.shutdown()
    server.server_close()


def test_an_id_is_downloaded_without_the_repositorys_other_files(
    tmp_path: Path, hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a split model all parts come. Later the cache has them, also where no hub can be reached."""
    save_gguf(tmp_path / "x-Q4_K_M.gguf", types="Q4_K")
    save_gguf(tmp_path / "x-Q8_0.gguf", types="Q8_0", num_files=2)
    parts = [f"x-Q8_0-{number:05d}-of-00002.gguf" for number in (1, 2)]
    files = {"x-Q4_K_M.gguf": "x-Q4_K_M.gguf", "Q8/" + parts[0]: parts[0], "Q8/" + parts[1]: parts[1]}
    contents = {name: (tmp_path / own).read_bytes() for name, own in files.items()}
    monkeypatch.setattr(FakeHub, "files", contents | {"README.md": b"", "x-F16.gguf": b"", "mmproj-x.gguf": b""})
    LLM("owner/name", tokenizer="tiny-qwen3", load_format="gguf", **OPTIONS).close()
    assert FakeHub.sent == ["x-Q4_K_M.gguf"]
    LLM("owner/name:q8_0", **OPTIONS).close()
    assert sorted(FakeHub.sent[1:]) == sorted(name for name in contents if name.startswith("Q8/"))
    assert find_gguf(f"owner/name/Q8/{parts[1]}").path.name == parts[0]
    assert len(FakeHub.sent) == 3
    assert "model 'owner/name:Q5_0' has 0 files of Q5_0; name one" in fail("owner/name:Q5_0")
    assert "could be downloaded: 404 Client Error. Repository Not Found" in fail("owner/other:Q4_0")
    with pytest.raises(ValueError, match=r"could be downloaded: .*revision"):
        find_gguf("owner/name", "other")
    hub.shutdown()
    hub.server_close()
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    assert find_gguf("owner/name:Q8_0").path.name == parts[0]
    assert "the cache's part of 'owner/name' has 0 files of F16; name one" in fail("owner/name:F16")


def test_load_format_gguf_is_for_models_in_gguf(tmp_path: Path) -> None:
    """vLLM's scripts give it. A folder may have both kinds."""
    save_gguf(tmp_path / "model.gguf")
    save_random(tmp_path / "folder")
    save_random(tmp_path / "both")
    save_gguf(tmp_path / "both" / "model.gguf")
    for model in ("model.gguf", "both"):
        with LLM(tmp_path / model, load_format="gguf", quantization="gguf", **OPTIONS) as llm:
            assert llm.engine.config.quantization == "gguf"
    assert 'folder has no model in GGUF; load_format="auto" reads' in fail(tmp_path / "folder", load_format="gguf")
    assert "is not a GGUF file" in fail(tmp_path / "folder" / "config.json", load_format="gguf")
    for model in ("tiny-qwen3", "qwen3-0.6b"):
        assert f"GGUF file '{model}' does not exist" in fail(model, load_format="gguf")
    with pytest.raises(ValueError, match=r"hf_config_path.*a GGUF file says what its config.json would"):
        LLM(tmp_path / "model.gguf", hf_config_path="owner/name", **OPTIONS)
