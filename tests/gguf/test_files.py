"""Where a model in GGUF is found: a file, the one in a folder, one of several quantisations of a repository."""

from pathlib import Path
from typing import Any

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
