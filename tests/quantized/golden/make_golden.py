"""Writes the files beside it: one matrix for each format, packed by the library that defines the format.

    python make_golden.py --awq AUTOAWQ --auto-gptq AUTO_GPTQ --gptqmodel GPTQMODEL

The three folders are the unpacked source archives of autoawq 0.2.9, auto-gptq 0.7.1 and gptqmodel 7.7.0. Their kernels
need a GPU to install, so only the files that pack are loaded from there. compressed-tensors 0.20.0 is installed as
usual.
Each file has the library's tensors and "dequantized", the weights [out, in] that the library makes of them.
"""

import argparse
import ast
import importlib.util
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

OUT = 32
IN = 64
GROUP = 32
FOLDER = Path(__file__).parent


def draw_weight(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(IN, OUT, bias=False).requires_grad_(False)


def find_scales(weight: Tensor, groups: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zeros, float32 [out, groups], for columns whose groups are given."""
    scales = []
    zeros = []
    top = 2**bits - 1
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        if symmetric:
            scales.append((part.abs().amax(1) * 2 / top).half().float())
            zeros.append(torch.full((OUT,), 2.0 ** (bits - 1)))
        else:
            low = part.amin(1).clamp(max=-1e-3)
            scale = ((part.amax(1).clamp(min=0) - low) / top).half().float()
            scales.append(scale)
            zeros.append((-low / scale).round().clamp(1, top))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def save(name: str, tensors: dict[str, Tensor], dequantized: Tensor) -> None:
    tensors = {key: value.contiguous() for key, value in tensors.items() if value is not None}
    save_file({**tensors, "dequantized": dequantized.float().contiguous()}, FOLDER / f"{name}.safetensors")


def make_awq(folder: Path) -> None:
    for package in ("awq", "awq.modules", "awq.modules.linear"):  # without their __init__, which imports all models
        module = ModuleType(package)
        module.__path__ = [str(folder / package.replace(".", "/"))]
        sys.modules[package] = module
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = draw_weight(0)
    scales, zeros = find_scales(linear.weight, torch.arange(IN) // GROUP, 4, symmetric=False)
    packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T, zeros=zeros.T)
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    weights = dequantize_gemm(*tensors.values(), 4, GROUP)
    save("awq", tensors, weights.T)


def make_auto_gptq(folder: Path) -> None:
    path = folder / "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py"
    spec = importlib.util.spec_from_file_location("qlinear_cuda_old", path)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for bits in (4, 8):
        linear = draw_weight(bits)
        linear.weight.data = linear.weight.data.half().float()
        scales, zeros = find_scales(linear.weight, torch.arange(IN) // GROUP, bits, symmetric=bits == 8)
        packed = module.QuantLinear(bits, GROUP, IN, OUT, bias=False)
        packed.pack(linear, scales.clone(), zeros.clone(), None)
        tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        weights = packed(torch.eye(IN)).T  # the library's product with the identity
        save(f"gptq_{bits}", tensors | {"scales": packed.scales.half()}, weights)


def make_gptqmodel(folder: Path) -> None:
    """gptq_v2 with desc_act. The class needs its kernels; its method `pack_original` does not."""
    import transformers

    source = (folder / "gptqmodel/nn_modules/qlinear/__init__.py").read_text()
    function = next(node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == "pack_original")
    names = {"t": torch, "nn": nn, "np": np, "math": math, "transformers": transformers, "_ConvNd": nn.Conv2d}
    names["THREADPOOLCTL"] = SimpleNamespace(threadpool_limits=lambda limit: nullcontext())
    exec(compile(ast.Module([function], []), "pack_original", "exec"), names)  # the library's own function
    linear = draw_weight(7)
    groups = (torch.arange(IN) // GROUP)[torch.randperm(IN)].int()
    scales, zeros = find_scales(linear.weight, groups, 4, symmetric=False)
    made: dict[str, Tensor] = {}
    self = SimpleNamespace(
        **{"bits": 4, "maxq": 15, "planar": False, "pack_factor": 8, "pack_dtype_bits": 32, "g_idx": groups},
        **{"pack_np_math_dtype": np.uint32, "pack_np_dtype": np.int32, "pack_dtype": torch.int32, "bias": None},
    )
    self.register_buffer = lambda name, value: (made.__setitem__(name, value), setattr(self, name, value))
    names["pack_original"](self, linear, scales, zeros, groups)
    columns = groups.long()
    codes = torch.round((linear.weight + (zeros * scales)[:, columns]) / scales[:, columns]).clamp(0, 15)
    save("gptq_v2_desc_act", made, (codes - zeros[:, columns]) * made["scales"].T.float()[:, columns])


def make_compressed() -> None:
    from compressed_tensors.compressors.naive_quantized.base import (
        FloatQuantizationCompressor,
        IntQuantizationCompressor,
    )
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "pack_4": (PackedQuantizationCompressor, {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
        "pack_4_zeros": (
            PackedQuantizationCompressor,
            {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False},
        ),
        "pack_8": (PackedQuantizationCompressor, {"num_bits": 8, "strategy": "channel"}),
        "int_8": (IntQuantizationCompressor, {"num_bits": 8, "strategy": "channel"}),
        "float_8": (FloatQuantizationCompressor, {"num_bits": 8, "type": "float", "strategy": "channel"}),
        "float_8_block": (
            FloatQuantizationCompressor,
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
        ),
    }
    for seed, (name, (compressor, arguments)) in enumerate(cases.items()):
        weight = draw_weight(10 + seed).weight.data
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        state: dict[str, Tensor] = {"weight": weight}
        if name == "float_8_block":
            blocks = weight.view(OUT // 16, 16, IN // 32, 32)
            state["weight_scale"] = blocks.abs().amax((1, 3)) / 448
        elif arguments.get("type") == "float":
            state["weight_scale"] = weight.abs().amax(1, keepdim=True) / 448
        else:
            size = arguments.get("group_size", IN)
            bits = arguments["num_bits"]
            symmetric = arguments.get("symmetric", True)
            scales, zeros = find_scales(weight, torch.arange(IN) // size, bits, symmetric)
            state["weight_scale"] = scales
            if not symmetric:
                state["weight_zero_point"] = (zeros - 2 ** (bits - 1)).to(torch.int8)
        compressed = compressor.compress(state, scheme)
        weights = compressor.decompress(dict(compressed), scheme)["weight"]
        save(name, compressed, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--awq", "--auto-gptq", "--gptqmodel"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    make_compressed()
    make_awq(options.awq)
    make_auto_gptq(options.auto_gptq)
    make_gptqmodel(options.gptqmodel)


if __name__ == "__main__":
    main()
