"""Finds a model in GGUF: a file, the one in a folder, or a file of a repository on a Hugging Face hub."""

import re
from collections.abc import Iterable
from pathlib import Path

from nanovllm.features.gguf.model import GgufModel
from nanovllm.features.gguf.reader import SPLIT
from nanovllm.models.hub import ModelNotFoundError, as_path, shorten_reason
from nanovllm.utils.checks import quote, refuse

USUAL = "Q4_K_M"
"""The quantisation that is taken if none is named, as llama.cpp and ollama take it."""
ID = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?::([\w.-]+)|/(.+\.gguf))?")
"""A repository, alone, with a quantisation behind a colon, or with the path of a file in it."""
NO_MODEL = re.compile(r"^(mmproj|imatrix)|[-_.](mmproj|imatrix)[-_.]", re.IGNORECASE)
"""Names of files that hold no language model: for pictures, or what a quantiser has counted."""


def find_gguf(model: str, revision: str | None = None, downloads: bool = True) -> GgufModel:
    """Return the model of a file, of a folder with one GGUF, or of a hub id.

    An id is "owner/name", "owner/name:Q4_K_M" or "owner/name/model-Q4_K_M.gguf".

    Args:
        revision: a branch, a tag or a commit of a hub id.
        downloads: whether a file may be downloaded that the cache of huggingface_hub does not have.

    Raises:
        ValueError: there is no such file, or there are several.
    """
    path = as_path(model)
    if path.exists():
        if revision not in (None, "main"):
            raise refuse(revision, "revision", f'left out, or "main": {path} is here, and has no revisions')
        return GgufModel(choose_in_folder(path) if path.is_dir() else path)
    return GgufModel(find_on_hub(model, revision, downloads))


def choose_in_folder(folder: Path) -> Path:
    """Return the one model in GGUF of a folder; ValueError if there is none, or several."""
    names = list_models(path.name for path in folder.glob("*.gguf"))
    if not names:
        raise ValueError(f'{folder} has no model in GGUF; load_format="auto" reads safetensors')
    if len(names) > 1:
        raise ValueError(f"{folder} has {len(names)} models in GGUF; name one of these files: {', '.join(names)}")
    return folder / names[0]


def list_models(names: Iterable[str]) -> list[str]:
    """Return the files of language models among the names, of a split one the first."""
    found = [name for name in names if name.endswith(".gguf") and not NO_MODEL.search(name.rpartition("/")[2])]
    splits = {name: SPLIT.fullmatch(name) for name in found}
    return sorted(name for name, split in splits.items() if split is None or int(split[2]) == 1)


def choose_on_hub(names: Iterable[str], asked: str | None, owner: str) -> str:
    """Return the name of a repository's file that has the quantisation that was asked for.

    Args:
        asked: "Q4_K_M", say, or the path of a file, or of one part of a split one; None takes Q4_K_M, or else the only
            file.
        owner: what has these files, for messages.

    Raises:
        ValueError: no file has it, or several have it.
    """
    found = list_models(names)
    first = SPLIT.sub(r"\1-00001-of-\3.gguf", asked or "")
    wanted = [name for name in found if name == first or has_quantisation(name, asked or USUAL)]
    if len(wanted) == 1:
        return wanted[0]
    if asked is None and len(found) == 1:
        return found[0]
    listed = ", ".join(found[:20]) or "none"
    what = f"{len(wanted)} files of {asked}" if asked else f"{len(found)} models in GGUF"
    raise ValueError(f"{owner} has {what}; name one behind a colon, as in owner/name:{USUAL}: {listed}")


def has_quantisation(name: str, asked: str) -> bool:
    """Return whether a file's name, or that of its folder, has a quantisation: "Q4_K_M" is not in "x-IQ4_K_M"."""
    pattern = rf"(^|[-_./]){re.escape(asked)}($|[-./])"
    return re.search(pattern, name.removesuffix(".gguf"), re.IGNORECASE) is not None


def find_on_hub(model: str, revision: str | None, downloads: bool) -> Path:
    """Return a file of a repository, from the cache or downloaded, with all parts of it if it is split."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    match = ID.fullmatch(model)
    if match is None:
        raise ModelNotFoundError(f"GGUF file {quote(model)} does not exist")
    repository, quantisation, path = match.groups()
    is_local = constants.HF_HUB_OFFLINE or not downloads
    try:
        if not is_local:
            try:
                siblings = HfApi().model_info(repository, revision=revision).siblings
            except HfHubHTTPError:
                raise
            except Exception:  # no hub can be reached: versions of huggingface_hub have different errors for it
                is_local = True
        if is_local:
            # Without a pattern all files of the repository would have to be there.
            folder = Path(snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=[]))
            names = [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]
        else:
            names = [str(sibling.rfilename) for sibling in siblings or ()]
        owner = f"the cache's part of {quote(repository)}" if is_local else f"model {quote(model)}"
        name = choose_on_hub(names, quantisation or path, owner)
        split = SPLIT.fullmatch(name)
        pattern = name if split is None else f"{split[1]}-*-of-{split[3]}.gguf"
        if not is_local:
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=[pattern]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"model {quote(model)} is neither a local GGUF file, nor one that could be downloaded: "
            f"{shorten_reason(error)}"
        ) from error
    return folder / name
