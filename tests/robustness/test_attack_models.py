"""A model folder from a stranger is data: none of its code runs, no file outside it is read, no damage crashes."""

import builtins
import json
import os
import random
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.any_models import compare, save_any
from helpers.paths import BOX_MODEL
from helpers.quantized import CHECKPOINTS, save_quantised
from helpers.tiny import CROWDED, edit_json, save_random
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GemmaConfig, GemmaForCausalLM, Qwen3MoeForCausalLM, modeling_utils
from transformers.integrations import hub_kernels

from nanovllm import LLM, SamplingParams
from nanovllm.models.model_config import FAMILIES, OTHERS, find_family, load_model_config
from nanovllm.models.sizes import Sizes

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kvcache_memory_bytes": 8 << 20}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in model, to be spoilt."""
    return Path(shutil.copytree(BOX_MODEL, tmp_path / "model"))


CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import PreTrainedTokenizerFast, Qwen3Config
class Own(PreTrainedTokenizerFast): pass
class OwnConfig(Qwen3Config): pass
"""


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_code_in_a_model_folder_is_never_run_nor_asked_about(
    where: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    edit_json(folder / "config.json", model_type=None)  # else transformers takes a tokenizer of its own
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Own")
    edit_json(folder / where, auto_map={"AutoTokenizer": ["own.Own", None], "AutoConfig": "own.OwnConfig"})

    def consent(_: str = "") -> str:
        asked.append(True)
        return "y"

    asked: list[bool] = []
    monkeypatch.setattr(builtins, "input", consent)
    try:
        LLM(folder, **OPTIONS).close()
    except ValueError as error:
        assert "tokenizer" in str(error)
    assert not asked and not marker.exists()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that a stand-in for the package kernels was asked for: it would fetch native code and import it."""
    names: list[str] = []

    def fetch(name: str, **_: Any) -> None:
        names.append(name)
        raise OSError

    for module in (hub_kernels, modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", fetch, raising=False)
    return names


ATTENTION: tuple[Any, ...] = ("evil/kernel", "flash_attention_2", "paged|evil/kernel", "sdpa", {"": "evil/kernel"}, 7)
EXPERTS: tuple[Any, ...] = ("evil/kernel", "deepgemm", "sonicmoe", "grouped_mm", 7)
CHOOSING_CODE: list[dict[str, Any]] = [
    *({key: value} for key in ("_attn_implementation", "attn_implementation") for value in ATTENTION),
    *({key: value} for key in ("_experts_implementation", "experts_implementation") for value in EXPERTS),
    {"_attn_implementation_internal": "evil/kernel", "_experts_implementation_internal": "deepgemm"},
    {"per_layer_config": {"0": {"_attn_implementation": "evil/kernel"}}},
    {"use_kernels": True, "kernel_config": {"RMSNorm": "evil/kernel:RMSNorm"}},
    {"auto_map": {"AutoConfig": "evil.Config"}, "_name_or_path": "evil/kernel", "custom_generate": "evil/kernel"},
    {"model_impl": "nanovllm", "is_headless": True, "_auto_class": "evil", "__class__": "evil"},
    {"to_json_string": 5, "to_dict": 5, "get_text_config": 5, "sub_configs": {"text": 5}, "attribute_map": {"a": "b"}},
]


@pytest.mark.parametrize("nested", [False, True], ids=["", "in text_config"])
@pytest.mark.parametrize("changes", CHOOSING_CODE, ids=[str(changes)[:50] for changes in CHOOSING_CODE])
def test_no_key_of_config_json_chooses_code(changes: dict[str, Any], nested: bool, fetched: list[str]) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    data = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        **sizes,
        **changes,
    }
    plain = load_model_config({"text_config": data, "model_type": "x"} if nested else data, "config.json")
    model = Sizes(plain).model.hf
    assert model.config._attn_implementation == "nanovllm"
    assert model.config._experts_implementation == "batched_mm"
    assert not fetched
    assert json.loads(plain.to_json_string())["hidden_size"] == 64


def test_the_stand_in_for_kernels_would_see_what_a_config_names(fetched: list[str]) -> None:
    config = GemmaConfig(vocab_size=10, hidden_size=8, num_hidden_layers=0)
    for name in ("evil/kernel", "flash_attention_2"):
        with pytest.raises((OSError, ValueError, ImportError)):
            GemmaForCausalLM._from_config(config, attn_implementation=name)
    assert fetched == ["evil/kernel", "kernels-community/flash-attn2"]


def test_model_impl_of_a_config_does_not_win_over_the_user_s(folder: Path) -> None:
    for given, family in (("nanovllm", "Qwen3ForCausalLM"), ("auto", "Qwen3ForCausalLM"), ("transformers", "")):
        for own in ("nanovllm", "transformers", "evil"):
            config = load_model_config({**BOX_CONFIG, "model_impl": own}, "config.json", given)
            assert find_family(config) is FAMILIES.get(family, OTHERS)
    data = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "model_impl": "transformers"}
    with pytest.raises(ValueError, match='model_impl="auto" also runs'):
        load_model_config(data, "config.json", "nanovllm")


RESULTS: dict[str, Any] = {
    **{"return_dict": False, "use_return_dict": False, "torchscript": True, "use_cache": True},
    **{"output_attentions": True, "output_hidden_states": True, "output_router_logits": True},
    "gradient_checkpointing": True,
}


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "OPTForCausalLM", "MixtralForCausalLM"])
def test_what_transformers_methods_return_and_keep_is_no_matter_of_the_folder(name: str, tmp_path: Path) -> None:
    model = save_any(tmp_path, name)
    for changes in ({"return_dict": False}, RESULTS):
        edit_json(tmp_path / "config.json", **changes)
        with LLM(tmp_path, **CROWDED | {"attention_backend": "torch"}) as llm:
            assert compare(model, llm).num_equal == 216


@pytest.mark.parametrize(
    "name", ["../elsewhere/model.safetensors", "{absolute}", "elsewhere/../../elsewhere/model.safetensors", "/dev/zero"]
)
def test_an_index_names_files_of_its_own_folder_alone(name: str, folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    (folder / "elsewhere").mkdir()
    elsewhere.mkdir()
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = list(file.keys())
    (folder / "model.safetensors").rename(elsewhere / "model.safetensors")
    name = name.format(absolute=elsewhere / "model.safetensors")
    edit_json(folder / "model.safetensors.index.json", weight_map=dict.fromkeys(tensors, name))
    with pytest.raises(ValueError, match=r"index\.json names .*; shards must be files of its own folder"):
        LLM(folder, **OPTIONS)


@pytest.mark.parametrize("name", ["", ".", "..", "a\0b", "x" * 300, "\ud800", None, 5, ["a"]])
def test_a_shard_name_that_is_none_is_refused(name: object, folder: Path) -> None:
    edit_json(folder / "model.safetensors.index.json", weight_map={"model.norm.weight": name})
    with pytest.raises(ValueError, match="shard"):
        LLM(folder, **OPTIONS)


# ---- Damaged files

WORKER = """
import json, sys
from nanovllm import LLM, SamplingParams
for line in sys.stdin:
    try:
        with LLM(line.strip(), **json.loads(sys.argv[1])) as llm:
            prompts = ["the cat", [5, 6, 7]] if llm.engine.tokenizer else [[5, 6, 7]]
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            ends = [output["finish_reason"] for output in llm.generate(prompts, params, use_tqdm=False)]
        result = "ok" if set(ends) <= {"length", "error"} else f"ended {ends}"
    except ValueError as error:
        result = "refused" if len(str(error)) < 2000 else f"a message of {len(str(error))} characters"
    except BaseException as error:
        result = f"{type(error).__name__}: {str(error)[:200]}"
    print(json.dumps(result), flush=True)
"""


@pytest.fixture(scope="module")
def victim() -> Iterator[subprocess.Popen[str]]:
    """A process that loads the folders it is told, and says how that went: a crash must not be the tests'."""
    command = [sys.executable, "-c", WORKER, json.dumps(OPTIONS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.kill()


VALUES = [None, -1, 0, 10**12, 10**400, "x", [], {}, True, 1.5, [1, 2], "\ud800", 2**31, 1e-30, -1e30, float("nan")]


def spoil(folder: Path, rng: random.Random) -> str:
    """Damage one file: flipped bytes, a cut, a strange value. Returns what was done."""
    name = rng.choice(["config.json"] * 3 + ["tokenizer.json", "generation_config.json", "tokenizer_config.json"])
    if rng.random() < 0.4:
        name = "model.safetensors"
    path = folder / name
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little") if name == "model.safetensors" else len(content)
    how = rng.choice(["flip", "flip", "cut", "value" if name.endswith("config.json") else "flip"])
    if how == "cut":
        del content[rng.choice([0, 1, 7, 8, 9, header - 1, header, rng.randrange(len(content))]) :]
    elif how == "value":
        data = json.loads(content)
        key = rng.choice(list(data))
        data[key] = rng.choice(VALUES)
        how = f"{key} = {str(data[key])[:20]}"
        content = bytearray(json.dumps(data).encode())
    else:
        places = [rng.randrange(rng.choice([8, header, len(content)])) for _ in range(rng.choice([1, 1, 3]))]
        for place in places:
            content[place] ^= rng.randrange(1, 256)
        how = f"flip {places}"
    path.write_bytes(content)
    return f"{name}: {how}"


def ask_to_load(victim: subprocess.Popen[str], folder: Path) -> str:
    """How the victim fares with a folder; fails if it says nothing for a minute, or dies."""
    assert victim.stdin is not None and victim.stdout is not None
    victim.stdin.write(f"{folder}\n")
    victim.stdin.flush()
    ready, _, _ = select.select([victim.stdout], [], [], 600)
    assert ready, "nothing for ten minutes"
    line = victim.stdout.readline()
    assert line, f"the process ended with {victim.wait()}"
    result: str = json.loads(line)
    return result


def assert_survives(victim: subprocess.Popen[str], folder: Path, seed: int) -> str:
    what = spoil(folder, random.Random(seed))
    result = ask_to_load(victim, folder)
    assert result in ("ok", "refused"), f"seed {seed}, {what}: {result}"
    return result


@pytest.mark.slow
def test_damage_is_refused_or_harmless(victim: subprocess.Popen[str], tmp_path: Path) -> None:
    """test_attack_kills.py has more damage, in a process with less memory."""
    results = [assert_survives(victim, shutil.copytree(BOX_MODEL, tmp_path / str(seed)), seed) for seed in range(12)]
    assert set(results) == {"ok", "refused"}


def spoil_experts(folder: Path, rng: random.Random) -> str:
    """Damage one tensor of quantised experts: it is gone, has another shape or type, or strange values."""
    tensors = load_file(folder / "model.safetensors")
    name = rng.choice(sorted(name for name in tensors if "experts" in name))
    old = tensors.pop(name)
    how = rng.choice(["gone", "cut", "flat", "empty", "another type", "largest", "smallest", "not a number"])
    finfo = torch.finfo(old.dtype) if old.is_floating_point() else torch.iinfo(old.dtype)
    values = {"largest": finfo.max, "smallest": finfo.min}
    if old.is_floating_point():
        values["not a number"] = float("nan")
    match how:
        case "cut":
            tensors[name] = old[..., :-1].contiguous()
        case "flat":
            tensors[name] = old.flatten()
        case "empty":
            tensors[name] = old.flatten()[:0]
        case "another type":
            tensors[name] = old.to(torch.int32 if old.dtype == torch.float32 else torch.float32)
        case _ if how != "gone":
            tensors[name] = torch.full(old.shape, values.get(how, 0), dtype=torch.float64).to(old.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return f"{name}: {how}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_damaged_quantised_experts_are_refused_or_harmless(
    name: str, victim: subprocess.Popen[str], tmp_path: Path
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    save_random(tmp_path / "model", model_class=Qwen3MoeForCausalLM, **experts)
    whole, _ = save_quantised(tmp_path / "model", tmp_path, *CHECKPOINTS[name])
    assert ask_to_load(victim, whole) == "ok"
    results = []
    for seed in range(4):
        folder = Path(shutil.copytree(whole, tmp_path / str(seed)))
        what = spoil_experts(folder, random.Random(f"{name} {seed}"))
        results.append(ask_to_load(victim, folder))
        assert results[-1] in ("ok", "refused"), (seed, what, results[-1])
    assert "refused" in results


BOX_CONFIG = json.loads((BOX_MODEL / "config.json").read_text())
NUMBERS = [name for name, value in BOX_CONFIG.items() if type(value) in (int, float)]
ROPE: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
HUGE_ROPE = [
    {**ROPE, "factor": 10**400},
    {**ROPE, "original_max_position_embeddings": 10**400},
    {**ROPE, "factor": 10**30},
]


@pytest.mark.parametrize("number", [10**30, 10**400, float("inf")], ids=["31 digits", "401 digits", "infinity"])
def test_numbers_that_no_computer_holds_are_refused_or_harmless(
    number: float, victim: subprocess.Popen[str], folder: Path
) -> None:
    changes: list[dict[str, Any]] = [{name: number} for name in NUMBERS]
    changes += [{"rope_scaling": rope} for rope in HUGE_ROPE] if number == 10**400 else []
    for change in changes:
        (folder / "config.json").write_text(json.dumps({**BOX_CONFIG, **change}))
        assert ask_to_load(victim, folder) in ("ok", "refused"), change


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {"default": {}, "linear": {"factor": 2.0}, "yarn": YARN, "llama3": LLAMA3}
MAY_BE_NULL = {"attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5}
WRONG_NUMBERS: list[Any] = ["4.0", True, [2.0], {"a": 1}, None, -2, 0]


@pytest.mark.parametrize("kind", ROPES)
def test_a_wrong_value_of_the_rotation_is_refused(kind: str) -> None:
    """Its values are numbers above 0. An mscale of 0 is none, and yarn's further ones may be null."""
    right = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    further = MAY_BE_NULL if kind == "yarn" else {}
    read_rope(right | further)
    read_rope(right | dict.fromkeys(further))
    for name in (*right, *further):
        if name == "rope_type":
            continue
        for value in WRONG_NUMBERS:
            may_be_null = name in further and value is None
            may_be_zero = "mscale" in name and value == 0
            if may_be_null or may_be_zero:
                continue
            with pytest.raises(ValueError, match=r"config\.json"):
                read_rope(right | {name: value})


def read_rope(rope: dict[str, Any]) -> None:
    load_model_config(BOX_CONFIG | {"rope_parameters": rope}, "config.json")


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "x.json"],
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_a_model_folder_is_refused_at_once(kind: str, name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"which is neither a file nor a folder|has no config\.json"):
        LLM(folder, **OPTIONS)


@pytest.mark.parametrize("eos", ["5", [[5]], 5.0, True])
def test_an_end_of_sequence_that_is_no_id_is_refused(eos: Any, folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=eos)
    with pytest.raises(ValueError, match="eos_token_id is"):
        LLM(folder, **OPTIONS)


def test_odd_defaults_are_refused_with_the_name_of_their_file(folder: Path) -> None:
    edit_json(folder / "generation_config.json", temperature=-1.0)
    with LLM(folder, **OPTIONS) as llm:
        with pytest.raises(ValueError, match=r"generation_config.json: temperature is -1.0.*: give SamplingParams"):
            llm.generate("a")
        assert llm.generate("a", SamplingParams(0, 2))
    edit_json(folder / "config.json", auto_map=5)
    with pytest.raises(ValueError, match="auto_map"):
        LLM(folder, **OPTIONS)
