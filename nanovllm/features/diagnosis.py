"""Says why a model could not be loaded: the advice of load.py's errors.

The spine raises short errors. This file then looks at the files, at the hub's answer and at the limits of memory. It is
imported only after something has failed, so it may take its time.
"""

import difflib
import errno
import json
import re
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError

from nanovllm.features.shapes import PRESETS
from nanovllm.models.headers import Headers
from nanovllm.models.hub import BOX, QUANTIZATION_CONFIGS, ModelNotFoundError, as_path, is_gguf
from nanovllm.models.model_folder import SETTINGS_FILE, SHARD, ModelFolder
from nanovllm.models.weight_names import name_some
from nanovllm.utils.checks import quote
from nanovllm.utils.memory import find_memory_limits, free_memory

LFS = b"version https://git-lfs.github.com/spec/"
"""The beginning of a git-lfs pointer: a small text in place of a large file."""

UNFINISHED_FILES = ("*.incomplete", "*.part", "*.crdownload", "*.aria2", "*.tmp")
"""Files that huggingface_hub, browsers and aria2 leave when a download ends early."""

CUT_SHORT = ("header too small", "invalid header length", "file not fully covered")
"""Words of safetensors' errors for a file that is shorter than its header says."""


NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc", "DefaultCPUAllocator")
"""Words of the errors that torch, safetensors and the operating system raise when memory runs out."""


def explain(error: Exception, model: str) -> ValueError | None:
    """Return the error with advice; None if there is nothing to add.

    Args:
        error: the exception that ended `LLM(model)`.
        model: what the user called the model.
    """
    advice = advise_on_memory(error) or advise_on_compiler(error)
    if not advice and isinstance(error, ValueError):
        with suppress(OSError, ValueError, AttributeError):  # a file that cannot be read: the first error says enough
            advice = advise_on_model(error, model)
    return ValueError(f"{_first_line(error)}: {advice}") if advice else None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(" .:")


def advise_on_model(error: ValueError, model: str) -> str:
    """Return advice about the model's files, or its name, if the error is about that; else ""."""
    path = as_path(model)
    if isinstance(error, ModelNotFoundError):
        cause = error.__cause__
        return (
            advise_on_name(model, path)
            if cause is None
            else advise_on_hub(cause, "/".join(model.partition(":")[0].split("/")[:2]))
        )
    if is_gguf(model):
        return f"{path.name} {ADVICE_ON_POINTERS}" if path.is_file() and is_lfs_pointer(path) else ""
    downloaded = re.search(r"\S*/snapshots/[0-9a-f]{40}", str(error))
    folder = Path(downloaded[0]) if downloaded else path
    if path.is_file():
        return f"name the folder, {path.absolute().parent}"
    return advise_on_folder(folder, error) if folder.is_dir() and str(folder) in str(error) else ""


# ---- folders

ADVICE_ON_POINTERS = (
    "is a git-lfs pointer: a note in place of a large file; run `git lfs install` and then `git lfs pull` in its "
    "folder, or download the model with `hf download`"
)


def advise_on_folder(folder: Path, error: ValueError) -> str:
    """Return what is wrong with a model's folder, and how to mend it; "" if nothing is found."""
    if pointers := [path.name for path in _list_files(folder) if is_lfs_pointer(path)]:
        return f"{name_some(pointers)} in {folder} {ADVICE_ON_POINTERS}"
    names = {path.name for path in _list_files(folder)}
    weights = {name for name in names if name.endswith(".safetensors")}
    if "adapter_config.json" in names and not weights - {"adapter_model.safetensors"}:
        return advise_on_adapter(folder)
    again = "; complete it, for example with `hf download MODEL --local-dir FOLDER`, which fetches only what is missing"
    if missing := find_missing_shards(weights):
        return f"the download of {folder} is incomplete: it lacks {name_some(missing)}{again}"
    if any(words in str(error) for words in CUT_SHORT):
        return "the file is cut short: its download is incomplete; delete it and download it again"
    if not weights or "config.json" not in names:
        if unfinished := find_unfinished(folder):
            return f"the download of {folder} is incomplete: there is {name_some(unfinished)}{again}"
        if inner := sorted(path.parent for path in folder.glob("*/config.json")):
            return f"did you mean {name_some([str(path) for path in inner])}?"
    return advise_on_tensors(folder) if any(words in str(error) for words in OTHER_TENSORS) else ""


OTHER_TENSORS = (" lacks ", " tensors that the model does not", "; config.json asks for ")
"""Words of the loader's errors for a checkpoint with other tensors than config.json asks for."""

LOOKS_LIKE = (
    (r"\.(absmax|quant_map|quant_state\..+)$", "bitsandbytes' quantised weights, which are not supported"),
    (r"\.(qweight|qzeros)$", "weights quantised by GPTQ or AWQ"),
    (r"\.weight_packed$", "weights quantised by compressed-tensors"),
    (r"\.(weight_scale|weight_scale_inv)$", "weights quantised to FP8 or int8"),
    (r"\.lora_[AB]\.", "an adapter (LoRA) that is not merged: load its base model, with the option lora, or merge it"),
    (r"^(model\.)?base_model\.", "a model that PEFT has wrapped: save it after merge_and_unload()"),
    (r"(^|\.)(_orig_mod|module|_fsdp_wrapped_module)\.", "a wrapped model: save the one inside (torch.compile, FSDP)"),
    (
        r"(tok_embeddings\.|\.attention\.wq\.|\.feed_forward\.w1\.)",
        "the format of the model's authors, not transformers': convert it with transformers' script for the model",
    ),
    (r"(^|\.)transformer\.(h|wte)\.", "a model of GPT-2's kind, which is another architecture"),
    (r"\.(kv_a_proj_with_mqa|kv_b_proj)\.", "a model with latent attention (MLA), which is another architecture"),
    (r"\.(block_sparse_moe|experts)\.", "a mixture of experts, and config.json names another architecture"),
    (r"(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\.", "a model that also reads pictures"),
    (r"(^|\.)(score|classifier|v_head|value_head|reward_head)\.", "a model that gives scores in place of tokens"),
    (r"_(scale|zero_point)$", "a checkpoint with scales that are not read here"),
    (r"\.bias$", "a model with biases that config.json does not ask for"),
)
"""(form of a tensor's name, what a checkpoint with such names looks like), the surest first."""


def advise_on_tensors(folder: Path) -> str:
    """Return what kind of checkpoint the names of its tensors look like; "" if they look like none that is known."""
    model = ModelFolder(folder)
    headers = Headers(model)
    config = model.config
    looks = next((kind for form, kind in LOOKS_LIKE if any(re.search(form, name) for name in headers.names)), "")
    num_layers = config.get("num_hidden_layers")
    if not looks and headers.count_layers() != num_layers:
        looks = f"a model of {headers.count_layers()} layers, and config.json says {quote(num_layers)}"
    if not looks:
        return ""
    settings = config.get("quantization_config")
    if "quantised" in looks and isinstance(settings, dict):
        method = quote(settings.get("quant_method"))
        file = settings.get(SETTINGS_FILE, "config.json")
        return f"the checkpoint looks like {looks}: it is quantised, by {method}, and its settings are in {file}"
    if "quantised" in looks:
        looks += f", and neither config.json nor {' nor '.join(QUANTIZATION_CONFIGS)} has its settings"
    return f"the checkpoint looks like {looks}"


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def is_lfs_pointer(path: Path) -> bool:
    """Return whether the file is the small text that git-lfs puts in place of a large file."""
    with path.open("rb") as file:
        return file.read(len(LFS)) == LFS


def find_missing_shards(weights: set[str]) -> list[str]:
    """Return the shards that are not there, though the names of the others tell of them."""
    expected: set[str] = set()
    for name in weights:
        if match := SHARD.fullmatch(name):
            count = int(match[3])
            expected |= {f"{match[1]}-{i:05d}-of-{match[3]}.safetensors" for i in range(1, min(count, 9999) + 1)}
    return sorted(expected - weights)


def find_unfinished(folder: Path) -> list[str]:
    """Return files of a download that has not ended, in the folder or where huggingface_hub keeps them."""
    places = (folder, folder / ".cache" / "huggingface" / "download", folder.parent.parent / "blobs")
    return sorted(path.name for place in places for pattern in UNFINISHED_FILES for path in place.glob(pattern))


def advise_on_adapter(folder: Path) -> str:
    """Return how to use a LoRA adapter: a folder with the changes to another model's weights, not with a model."""
    adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    base = adapter.get("base_model_name_or_path") or "the model that it was trained on"
    return f"{folder} is an adapter (LoRA) for {base}, not a model; load that model, with the option lora={folder}"


# ---- names


def advise_on_name(model: str, path: Path) -> str:
    """Return the id in a page's address, or the model, shape or folder whose name resembles this one; else the forms
    that a name may have."""
    if page := re.match(r"https?://[^/]+/(?:models/)?([\w.-]+/[\w.-]+)", model):
        return f'a model is named by its id, not by its page: "{page[1]}"'
    names = [BOX, *PRESETS, *PRESETS.values()]
    by_small_letters = {name.lower(): name for name in names}
    near = difflib.get_close_matches(model.lower(), by_small_letters, n=1, cutoff=0.7)
    if near:
        found = by_small_letters[near[0]]
        return f'did you mean "{PRESETS.get(found, found)}"?'
    parent = path.absolute().parent
    if parent.is_dir():
        folders = [entry.name for entry in parent.iterdir() if entry.is_dir()]
        if near := difflib.get_close_matches(path.name, folders, n=1, cutoff=0.7):
            return f'did you mean the folder "{parent / near[0]}"?'
    return f'name a local folder, an id of the hub such as "Qwen/Qwen3-0.6B", or "{BOX}", the built-in model'


# ---- the hub


def advise_on_hub(cause: BaseException, model: str) -> str:
    """Return what to do about a download that failed.

    Args:
        cause: huggingface_hub's exception.
    """
    from huggingface_hub import constants, errors

    elsewhere = f"or download it elsewhere with `hf download {model} --local-dir FOLDER`, and name the folder"
    if isinstance(cause, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{model}"
        return f"accept its authors' terms at {page}, then log in with `hf auth login` or set HF_TOKEN"
    if isinstance(cause, errors.RepositoryNotFoundError):
        names = {name.lower(): name for name in PRESETS.values()}
        near = difflib.get_close_matches(model.lower(), names, n=1, cutoff=0.8)
        hint = f'did you mean "{names[near[0]]}"? ' if near else ""
        return f"{hint}the hub has no model of that name, or it is private: then log in with `hf auth login`"
    if isinstance(cause, errors.RevisionNotFoundError):
        return "the model has no such revision: give a branch, a tag or a commit that its page on the hub lists"
    if isinstance(cause, errors.IncompleteSnapshotError):
        return f"an earlier download is incomplete, and the hub cannot be asked: repeat it with a network, {elsewhere}"
    if constants.HF_HUB_OFFLINE or isinstance(cause.__cause__, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have the model: unset it, {elsewhere}"
    if isinstance(cause, errors.HfHubHTTPError):
        return f"the hub {constants.ENDPOINT} answered with an error: try again later, {elsewhere}"
    return (
        f"the hub {constants.ENDPOINT} cannot be reached: check the network (HTTPS_PROXY, if you are behind a proxy), "
        f"set HF_ENDPOINT to a mirror, {elsewhere}"
    )


# ---- memory


def advise_on_memory(error: Exception) -> str:
    """Return which options take less memory, if the error says that memory ran out; else ""."""
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not no_memory and not any(words in str(error) for words in NO_MEMORY):
        return ""
    limits = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in find_memory_limits().items())
    return (
        f"memory ran out while the model was loaded; {free_memory() / 2**30:.2f} GiB are free"
        + (f" within the limits of this process ({limits})" if limits else "")
        + '. Lower kvcache_memory_bytes or max_num_batched_tokens, take dtype="bfloat16" or a smaller model, or raise '
        "the limit"
    )


def advise_on_compiler(error: Exception) -> str:
    """Return what Triton lacks, if the error says that it could not compile C; else "".

    Triton calls each kernel, and the GPU's driver, through a small library that it compiles on first use. If the
    compiler fails, the error has only its command: its message is on stderr.
    """
    has_failed = isinstance(error, CalledProcessError) and "-shared" in error.cmd
    if not has_failed and "Failed to find C compiler" not in str(error):
        return ""
    return (
        "Triton compiles a small C library, for which it needs gcc and Python's headers, for example the packages gcc "
        'and python3-dev; a compiler that fails has said why above. attention_backend="torch" needs no compiler, but '
        "is slow"
    )
