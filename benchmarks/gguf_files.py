"""Writes a model in GGUF, in each type of llama.cpp that is named: the built-in one, or a random one of a known shape.

    python benchmarks/gguf_files.py FOLDER BF16 Q4_0 Q8_0
    python benchmarks/gguf_files.py FOLDER Q2_K Q4_K_M --llama-cpp-python DIR/bin/python
    python benchmarks/gguf_files.py FOLDER Q4_K_M --shape qwen3-0.6b --llama-cpp-python DIR/bin/python

llama.cpp's own quantiser makes every type; scripts/rival_env.sh makes an interpreter that has it. The `gguf` package
makes some, with each matrix in that type. Both start from the file in BF16.

A block of most types has 256 weights of a row, and the built-in model's rows have 192 and 576: llama.cpp would take
other types for them. So they are filled up with zeros to 256 and 768, and what the norms read is scaled. The filled-up
model says what the built-in one says, and its blocks hold the same weights beside zeros.
"""

import argparse
import copy
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from nanovllm.features.shapes import PRESETS, preset_config
from nanovllm.models.hub import find_model

BUILT_IN = "tiny-qwen3"
SOURCE = "BF16"
"""The type of which the others are made."""
BLOCK = 256
"""Weights of the largest block that a type has."""
DENSE = [name for name in PRESETS if preset_config(name)["model_type"] == "qwen3"]
"""The shapes of which random models can be made."""
QUANTIZE = """
import sys
import llama_cpp

source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""


class CannotQuantize(ValueError):
    """Its message says why a type cannot be made here."""


def write_source(folder: Path, shape: str | None = None) -> Path:
    """Write a model in BF16, unless its file is there. Return the path.

    Args:
        shape: a name of `DENSE`, for random weights and the built-in tokenizer; None for the built-in model.
    """
    path = folder / f"{shape or BUILT_IN}-{SOURCE}.gguf"
    if path.is_file():
        return path
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    helpers = importlib.import_module("helpers.gguf_models")
    model = draw_model(shape) if shape else fill_up(load_built_in())
    metadata = helpers.describe_tokenizer(find_model(BUILT_IN), "qwen2", model.config.vocab_size)
    metadata["tokenizer.ggml.add_bos_token"] = False
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    helpers.write_gguf(partial, model, "qwen3", SOURCE, metadata)
    partial.rename(path)
    return path


def load_built_in() -> Any:
    """Return transformers' model of the built-in one, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(find_model(BUILT_IN), dtype=torch.float32)


def draw_model(shape: str) -> Any:
    """Return transformers' Qwen3 of a shape, with random weights in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**preset_config(shape)))


def fill_up(model: Any) -> Any:
    """Return a Qwen3 that says the same, whose rows are filled up with zeros to whole blocks.

    A norm divides by the root of the mean square over all elements, and zeros make that mean smaller. So its weights
    and its epsilon shrink, too.
    """
    config = copy.deepcopy(model.config)
    config.hidden_size += -config.hidden_size % BLOCK
    config.intermediate_size += -config.intermediate_size % BLOCK
    share = model.config.hidden_size / config.hidden_size
    config.rms_norm_eps *= share
    filled = type(model)(config).eval()
    values = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in filled.named_parameters():
            value = values[name]
            is_norm_of_hidden = "norm" in name and len(value) == model.config.hidden_size
            parameter.zero_()
            parameter[tuple(map(slice, value.shape))] = value * share**0.5 if is_norm_of_hidden else value
    return filled


def quantize(source: Path, kind: str, python: str | None) -> Path:
    """Write a file in BF16 in another type, unless that is there. Return the path.

    Args:
        python: an interpreter that has llama.cpp; None for the `gguf` package.

    Raises:
        CannotQuantize: Neither knows the type.
    """
    path = source.with_name(source.name.replace(SOURCE, kind))
    if path.is_file():
        return path
    partial = path.with_suffix(f".{os.getpid()}")
    if python is None:
        quantize_with_package(source, partial, kind)
    else:
        command = [python, "-c", QUANTIZE, str(source), str(partial), kind]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CannotQuantize(f"llama.cpp does not quantise to {kind}: {done.stderr.strip().splitlines()[-1]}")
    partial.rename(path)
    return path


def quantize_with_package(source: Path, target: Path, kind: str) -> None:
    """Write a file whose matrices the `gguf` package rounds. Everything else stays as it is."""
    import gguf

    matrices = gguf.GGMLQuantizationType.__members__.get(kind)
    try:
        gguf.quantize(torch.zeros(1, BLOCK).numpy(), matrices)
    except (NotImplementedError, AttributeError):
        raise CannotQuantize(
            f"the gguf package does not quantise to {kind}: give --llama-cpp-python an interpreter that has llama.cpp"
        ) from None
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            item = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], item)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        chosen = matrices if values.ndim > 1 else tensor.tensor_type
        writer.add_tensor(tensor.name, gguf.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def count_bytes(path: Path) -> tuple[int, int]:
    """Return how many bytes the tensors of a file have, and how many weights."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return sum(int(tensor.n_bytes) for tensor in tensors), sum(int(tensor.n_elements) for tensor in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("types", nargs="+", metavar="TYPE", help="such as BF16, Q8_0 or Q4_K_M")
    parser.add_argument("--shape", choices=DENSE)
    parser.add_argument("--llama-cpp-python", metavar="PYTHON", help="an interpreter that has llama.cpp")
    args = parser.parse_args()
    source = write_source(args.folder, args.shape)
    for kind in args.types:
        print(quantize(source, kind, args.llama_cpp_python))


if __name__ == "__main__":
    main()
