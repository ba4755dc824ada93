"""A model that cannot be loaded: the error says what the thing is, and what to do."""

import inspect
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import BOX_MODEL
from helpers.tiny import edit_json, save_random
from huggingface_hub import constants, errors
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams
from nanovllm.features.diagnosis import UNFINISHED_FILES, explain
from nanovllm.models import hub

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "kvcache_memory_bytes": 8 << 20}


def fail(model: object, **options: Any) -> str:
    """Return the message of the ValueError that loading the model raises."""
    with pytest.raises(ValueError) as caught:
        LLM(model, **OPTIONS | options).close()
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in model, to be spoilt."""
    return Path(shutil.copytree(BOX_MODEL, tmp_path / "model"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A model in four shards or more, with an index."""
    save_random(tmp_path / "shards", max_shard_size="60KB")
    return tmp_path / "shards"


@pytest.mark.parametrize(
    ("page", "meant"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/meta-llama/Llama-3.2-1B/tree/main", "meta-llama/Llama-3.2-1B"),
        ("http://mirror.example:8080/Qwen/Qwen3-0.6B?x=1", "Qwen/Qwen3-0.6B"),
        ("https://modelscope.cn/models/Qwen/Qwen3-0.6B/summary", "Qwen/Qwen3-0.6B"),
    ],
)
def test_the_address_of_a_page_is_answered_with_the_id_in_it(page: str, meant: str) -> None:
    assert fail(page).endswith(f'a model is named by its id, not by its page: "{meant}"')


# ---- other formats


def test_a_file_is_answered_with_its_folder(folder: Path) -> None:
    message = fail(folder / "model.safetensors")
    assert "is a file; a model is a folder" in message and message.endswith(f"name the folder, {folder}")


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_is_called_one_and_names_its_base(has_config: bool, folder: Path) -> None:
    edit_json(folder / "adapter_config.json", base_model_name_or_path="Qwen/Qwen3-0.6B", peft_type="LORA")
    (folder / "model.safetensors").unlink()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(4, 64)}, folder / "adapter_model.safetensors")
    if not has_config:
        (folder / "config.json").unlink()
    message = fail(folder)
    assert "is an adapter (LoRA) for Qwen/Qwen3-0.6B, not a model" in message
    assert message.endswith(f"load that model, with the option lora={folder}")


# ---- half of a model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 1503300328\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_git_lfs_pointer_is_called_one(name: str, folder: Path) -> None:
    (folder / name).write_text(POINTER)
    message = fail(folder)
    assert f"{name} in {folder} is a git-lfs pointer" in message and "git lfs pull" in message
    assert "hf download" in message


def test_a_missing_shard_is_named(shards: Path) -> None:
    names = sorted(path.name for path in shards.glob("*.safetensors"))
    (shards / names[1]).unlink()
    for has_index in (True, False):
        message = fail(shards)
        assert f"the download of {shards} is incomplete: it lacks {names[1]};" in message
        assert "hf download MODEL --local-dir FOLDER" in message
        if has_index:
            (shards / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_called_incomplete(share: float, folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, int(file.stat().st_size * share))
    message = fail(folder)
    assert f"{file} cannot be read" in message
    assert "the file is cut short: its download is incomplete" in message


def test_a_file_that_is_damaged_otherwise_is_not_called_cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[:8] = struct.pack("<Q", 1 << 62)
    file.write_bytes(data)
    message = fail(folder)
    assert f"{file} cannot be read" in message and "cut short" not in message


@pytest.mark.parametrize("place", [".", ".cache/huggingface/download"])
def test_a_download_that_has_not_ended_is_called_one(place: str, folder: Path) -> None:
    (folder / place).mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").rename(folder / place / "xyz=.4d7a214614.incomplete")
    message = fail(folder)
    assert f"the download of {folder} is incomplete: there is xyz=.4d7a214614.incomplete; complete it" in message
    assert "*.incomplete" in UNFINISHED_FILES


def test_a_snapshot_of_the_hub_without_weights_is_called_incomplete(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As huggingface_hub leaves it in its cache, and returns it if there is no network."""
    place = tmp_path / "models--someone--model"
    snapshot = place / "snapshots" / ("0123abcd" * 5)
    (place / "snapshots").mkdir(parents=True)
    (place / "blobs").mkdir()
    folder.rename(snapshot)
    (snapshot / "model.safetensors").rename(place / "blobs" / "4d7a214614.incomplete")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    message = fail("someone/model")
    assert f"the download of {snapshot} is incomplete: there is 4d7a214614.incomplete" in message
    (snapshot / "config.json").unlink()
    message = fail("someone/model")
    assert "has no config.json" in message and "is incomplete" in message


# ---- names


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    with LLM("~/model", **OPTIONS) as llm:
        assert len(llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)[0]["token_ids"]) == 1
    assert "no folder" in fail("~nobody-of-this-name/model") or "cannot be a folder" in fail(
        "~nobody-of-this-name/model"
    )
    message = fail("~/modl")
    assert "model folder '~/modl' does not exist" in message and f'did you mean the folder "{folder}"?' in message


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("tiny-qwen", "tiny-qwen3"),
        ("tiny_qwen3", "tiny-qwen3"),
        ("Tiny-Qwen3", "tiny-qwen3"),
        ("qwen3-06b", "Qwen/Qwen3-0.6B"),
        ("Qwen3-0.6", "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_name_that_nearly_is_one_is_answered_with_it(
    model: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any network is asked: ids of the hub have an owner and a slash."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub is asked"))
    assert fail(model) == f'model folder {model!r} does not exist: did you mean "{meant}"?'


def test_a_name_unlike_any_other_is_answered_with_the_forms_of_names(tmp_path: Path) -> None:
    message = fail(tmp_path / "nothing" / "here")
    assert message.endswith('an id of the hub such as "Qwen/Qwen3-0.6B", or "tiny-qwen3", the built-in model')


def test_the_folder_above_the_model_is_answered_with_the_model(folder: Path) -> None:
    assert f"has no config.json: did you mean {folder}?" in fail(folder.parent)


# ---- the hub


def make(kind: type[Exception]) -> Exception:
    """Return an exception without the answer of a hub that its __init__ asks for."""
    error = kind.__new__(kind, "no")
    error.args = ("no",)
    return error


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FAILURES: dict[str, tuple[Callable[[], Exception], str]] = {
    "no such name": (
        lambda: make(errors.RepositoryNotFoundError),
        'did you mean "Qwen/Qwen3-0.6B"? the hub has no model of that name, or it is private: then log in with `hf',
    ),
    "terms": (lambda: make(errors.GatedRepoError), "accept its authors' terms at "),
    "revision": (lambda: make(errors.RevisionNotFoundError), "the model has no such revision: give a branch"),
    "server": (lambda: make(errors.HfHubHTTPError), "answered with an error: try again later, or download it"),
    "no network": (lambda: errors.LocalEntryNotFoundError("Got: ConnectError"), "cannot be reached: check the network"),
    "a mirror": (lambda: errors.LocalEntryNotFoundError("Got: ConnectError"), "set HF_ENDPOINT to a mirror, or down"),
    "offline": (
        lambda: with_cause(errors.LocalEntryNotFoundError("no"), errors.OfflineModeIsEnabled("offline")),
        "HF_HUB_OFFLINE is set, and ",
    ),
    "half a snapshot": (
        lambda: errors.IncompleteSnapshotError("half", snapshot_path="x"),
        "an earlier download is incomplete, and the hub cannot be asked: repeat it with a network",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_of_the_hub_has_its_advice(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_error, advice = FAILURES[failure]

    def download(*_: object, **__: object) -> str:
        raise make_error()

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    message = fail("Qwen/Qwen3-0.6")
    assert message.startswith("model 'Qwen/Qwen3-0.6' is neither a local folder, nor a shape, nor an id that could be")
    assert advice in message


def test_a_hub_that_cannot_be_reached_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at this port: the real client's exceptions, and no waiting."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    real = hub_download()
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda model, **options: real(model, endpoint="http://127.0.0.1:9", cache_dir=tmp_path, **options),
    )
    message = fail("someone/model")
    assert "cannot be reached: check the network" in message and "--local-dir FOLDER" in message
    assert "\n" not in message


def hub_download() -> Callable[..., str]:
    from huggingface_hub import snapshot_download

    return snapshot_download


# ---- Triton's compiler of C


def test_without_a_c_compiler_the_error_says_what_triton_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "Failed to find C compiler"
    assert words in inspect.getsource(pytest.importorskip("triton.runtime.build"))
    monkeypatch.setattr("nanovllm.load.make_engine", raiser(RuntimeError(f"{words}. Please specify via CC")))
    message = fail("tiny-qwen3")
    assert "it needs gcc and Python's headers" in message and 'attention_backend="torch"' in message


def test_of_a_c_compiler_that_fails_it_is_said_what_it_may_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    error = subprocess.CalledProcessError(1, ["gcc", "main.c", "-O3", "-shared", "-fPIC"])
    monkeypatch.setattr("nanovllm.load.make_engine", raiser(error))
    message = fail("tiny-qwen3")
    assert message.startswith("Command '['gcc'") and "it needs gcc and Python's headers" in message
    other = subprocess.CalledProcessError(1, ["git", "pull"])
    assert explain(other, "tiny-qwen3") is None


def raiser(error: Exception) -> Callable[..., None]:
    def load(*_: object) -> None:
        raise error

    return load


# ---- advice comes only where it belongs


@pytest.mark.parametrize("model", ["tiny-qwen3", "{folder}"])
def test_a_wrong_option_gets_no_advice_about_files(model: str, folder: Path) -> None:
    (folder / "old.incomplete").touch()
    message = fail(model.format(folder=folder), kvcache_block_size=17)
    assert "kvcache_block_size is 17" in message and "download" not in message and "did you mean" not in message


def test_errors_that_nothing_is_known_about_stay_as_they_are(folder: Path) -> None:
    assert explain(ValueError("x"), str(folder)) is None
    assert explain(RuntimeError("CUDA out of memory"), str(folder)) is None
    assert explain(ValueError(f"{folder} is odd"), str(folder)) is None
    (folder / "adapter_config.json").write_text("no json")
    (folder / "model.safetensors").unlink()
    assert explain(ValueError(f"{folder} is odd"), str(folder)) is None


def test_the_commands_give_the_same_advice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nanovllm.apps.cli import main

    assert main(["estimate", "tiny-qwen", "--gpu-memory", "1GB"]) == 2
    assert 'did you mean "tiny-qwen3"?' in capsys.readouterr().err
    (folder / "model.safetensors").write_text(POINTER)
    lines = folder / "in.jsonl"
    lines.write_text(json.dumps({"prompt": "a"}) + "\n")
    assert main(["run-batch", "-i", str(lines), "-o", str(folder / "out.jsonl"), "--model", str(folder)]) == 2
    assert "is a git-lfs pointer" in capsys.readouterr().err
    assert hub.BOX == "tiny-qwen3"
