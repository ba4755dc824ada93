"""Compiles every Triton kernel as the engine launches it, with no GPU; prints a JSON list of what came out.

A program of its own, because Triton's compiler and its interpreter cannot share a process. The constexprs come from the
very functions that the wrappers call, so what is compiled here cannot drift from what is launched.

    python tests/helpers/compile_kernels.py ARCH...                 all for some of 80, 89, 90, 100 and 120
    python tests/helpers/compile_kernels.py --largest ARCH          the largest of each kind
    python tests/helpers/compile_kernels.py --quick ARCH            the same of three models
    python tests/helpers/compile_kernels.py --dtype float32 ARCH    another type than bfloat16
"""

import argparse
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanovllm.backends.gpu import (
    causal_conv,
    combine,
    dequantize,
    edit_logits,
    few_rows,
    gate_and_mul,
    gated_delta,
    gated_rms_norm,
    norm_rope_store,
    online_softmax,
    paged_decode,
    paged_prefill,
    product,
    rms_norm,
    round_inputs,
    route,
    sample,
    sample_filter,
    step_inputs,
    token_logprobs,
    triton_shim,
)
from nanovllm.ops.attention import AttentionVariant


class Model(NamedTuple):
    hidden_size: int
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128
    qk_norm: bool = True
    expert_size: int = 0
    """Of each of `num_experts` experts, of which a token has 8."""
    num_experts: int = 128
    value_heads: int = 0
    """Of linear attention, beside 16 key heads. All have 128 elements. Its models have norms with float32 weights."""


MODELS = {
    "0.6B": Model(1024, 16),
    "4B": Model(2560, 32),
    "8B": Model(4096, 32),
    "14B": Model(5120, 40),
    "32B": Model(5120, 64),
    "Qwen2.5 0.5B": Model(896, 14, 2, 64, qk_norm=False),
    "Qwen2.5 1.5B": Model(1536, 12, 2, qk_norm=False),
    "Qwen2.5 7B": Model(3584, 28, 4, qk_norm=False),
    "Llama 3.2 1B": Model(2048, 32, 8, 64, qk_norm=False),
    "30B-A3B": Model(2048, 32, 4, expert_size=768),
    "Qwen3.5 0.8B": Model(1024, 8, 2, 256, value_heads=16),
    "Qwen3.5 27B": Model(5120, 24, 4, 256, value_heads=48),
    "Qwen3.5 35B-A3B": Model(2048, 16, 2, 256, expert_size=512, num_experts=256, value_heads=32),
}
VOCAB_SIZE = 151_936
BLOCK_SIZES = (64, 256)  # the defaults: triton's own, and flash_attn's (which uses the small kernels)
SHARED_KIB = {arch: triton_shim._SHARED_KIB[divmod(arch, 10)] for arch in (80, 89, 90, 100, 120)}


class Form(NamedTuple):
    """How a matrix is quantised.

    Attributes:
        group_size: 0 for the whole row.
        shared: how many groups share a float16, of which each has a whole number of its own. 1: float16 alone. 0:
            float32.
        numbers: see `pack_numbers`.
    """

    bits: int
    group_size: int
    has_zeros: bool = False
    shared: int = 0
    has_minima: bool = False
    numbers: int | None = None


FORMATS = (Form(8, 0), Form(4, 128, has_zeros=True), Form(4, 32), Form(8, 128))
"""int8 at load, and checkpoints as they are published."""

IQ4 = product.pack_numbers((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
FROM_ZERO = product.pack_numbers(range(16))
BLOCKS = {
    "Q4_K": Form(4, 32, shared=8, has_minima=True, numbers=FROM_ZERO),
    "Q6_K": Form(8, 16, shared=16),
    "Q4_0": Form(4, 32, shared=1),
    "Q8_0": Form(8, 32, shared=1),
    "Q5_1": Form(8, 32, shared=1, has_minima=True),
    "Q2_K": Form(4, 16, shared=16, has_minima=True, numbers=FROM_ZERO),
    "Q3_K": Form(4, 16, shared=16),
    "IQ4_XS": Form(4, 32, shared=8, numbers=IQ4),
}
"""Blocks of GGUF. Q5_K is read as Q4_K is, Q5_0 as Q8_0, Q4_1 as Q5_1, and IQ4_NL as IQ4_XS, or in less steps."""

# Types by argument name: pointers first, then scalars; anything else is an int32.
_TYPES = {
    "*fp32": """cos_sin partial_out partial_lse chunk_max chunk_weight part_weight threshold weights penalties values
        log_sums scales x_scales partial recurrent a_log dt_bias solve attend gains sinks""",
    "*i32": """seq_lens items first_item share_begins arrivals block_tables cu_seqlens positions chunk_argmax listed
        places tokens offsets experts rows indices masks counts num_computed num_scheduled planned_ids tables table
        last_token token_ids checked num_above zeros""",
    "*i64": "slots",
}
_POINTERS = {f"{name}_ptr": kind for kind, names in _TYPES.items() for name in names.split()}
_FLOATS = ("eps", "scale_log2")
DTYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
"""A pointer to each type of activations and cache."""


CODES = {"*i8": 80, "*fp8e4nv": 89}
"""A pointer to each type of codes in a cache, and the first architecture that knows it."""


COUNTED = (
    "_choose_experts_kernel",
    "_sort_pairs_kernel",
    "_product_kernel",
)
"""Kernels whose instructions are counted."""


VARIANTS = (
    (2, 256, "*bf16", AttentionVariant(window=4096, softcap=50.0)),
    (4, 128, "*i8", AttentionVariant(window=4096)),
    (8, 64, "*bf16", AttentionVariant(window=128, sinks=torch.empty(8))),
)
"""Group, head_dim, type of the cache, and variant of attention: those of Gemma 2, Mistral and gpt-oss."""


class Launch(NamedTuple):
    """One kernel with one set of constexprs and options, and pointer types that differ from the usual.

    What has no type of its own has `own`, that of activations and cache. A number with a type is no multiple of 16.
    """

    kernel: Any
    config: tuple[tuple[str, float | None], ...]
    types: tuple[tuple[str, str], ...] = ()
    own: str = "*bf16"


def launches(models: dict[str, Model], block_sizes: tuple[int, ...], arch: int, dtype: torch.dtype) -> Iterator[Launch]:
    """Yield the launches of an engine for those models in dtype, without tensor parallelism and with the most of it."""
    own = DTYPES[str(dtype).removeprefix("torch.")]
    itemsize = dtype.itemsize
    # Float32 is no type for speed: kernels of float32 with codes spill.
    caches = {own: itemsize} | {code: 1 for code, first in CODES.items() if arch >= first and itemsize == 2}

    def launch(kernel: Any, config: Mapping[str, float | None], **types: str | None) -> Launch:
        absent = {name: None for name, kind in types.items() if kind is None}
        present = tuple((name, kind) for name, kind in types.items() if kind is not None)
        return Launch(kernel, (*config.items(), *absent.items()), present, own)

    def launch_attention(
        group: int,
        head_dim: int,
        block_size: int,
        cache: str,
        variant: AttentionVariant | None = None,
        ahead: bool = False,
    ) -> Iterator[Launch]:
        constants, sinks = online_softmax.read_variant(variant)
        if sinks is None:
            constants["sinks_ptr"] = None
        split = paged_decode.split_config(group, head_dim, block_size, caches[cache], SHARED_KIB[arch])
        split |= constants | {"AHEAD": ahead}
        types = {}
        if cache in CODES:
            types = dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache)
            types |= dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), "*fp32")
            read = types | dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*i16")
        else:
            read = dict.fromkeys(("k_scales_ptr", "v_scales_ptr"))
        yield launch(paged_decode._split_kernel, split | {"IS_FP8": cache == "*fp8e4nv"}, **read)
        shape = (group, head_dim, block_size, itemsize, caches[cache], SHARED_KIB[arch])
        yield launch(paged_prefill._prefill_kernel, paged_prefill.prefill_config(*shape) | constants, **types)

    roundings = ((False, {"codes_ptr": None, "scales_ptr": None}), (True, {"codes_ptr": "*i8"}))
    for model in models.values():
        wide = "*fp32" if model.value_heads else own
        for size, add in itertools.product((model.hidden_size, model.head_dim), (False, True)):
            for rounds, types in roundings:
                config = rms_norm.rms_norm_config(size, add, rounds)
                yield launch(rms_norm._rms_norm_kernel, config, weight_ptr=wide, **types)
        for block_size, (cache, cache_itemsize) in itertools.product(block_sizes, caches.items()):
            types = {}
            if cache in CODES:
                types = dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache)
                types |= dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), "*fp32")
            for ranks in (1, model.num_kv_heads):
                heads = model.num_heads // ranks
                kv_heads = model.num_kv_heads // ranks
                shape = (model.head_dim, block_size)
                yield launch(
                    norm_rope_store._norm_rope_store_kernel,
                    norm_rope_store.norm_rope_store_config(heads + 2 * kv_heads, *shape, model.qk_norm),
                    q_weight_ptr=wide,
                    k_weight_ptr=wide,
                    **types,
                )
            is_usual = block_size == block_sizes[0] and cache != "*fp8e4nv"
            if is_usual or model is MODELS["0.6B"]:
                # One model stands for the others with larger blocks, which nobody gets unasked, and with codes of fp8,
                # which are read as those of int8 are.
                yield from launch_attention(model.num_heads // model.num_kv_heads, *shape, cache)
            for num_seqs in (1, 512, 1024):
                yield launch(step_inputs._step_inputs_kernel, step_inputs.step_inputs_config(num_seqs, block_size))
                yield launch(
                    paged_decode._share_kernel, paged_decode.share_config(num_seqs, 49, *shape, cache_itemsize)
                )
        if model.value_heads:
            yield launch(causal_conv._causal_conv_kernel, causal_conv.causal_conv_config(4))
            config = gated_rms_norm.gated_rms_norm_config(model.value_heads, 128)
            yield launch(gated_rms_norm._gated_rms_norm_kernel, config)
            for rounds, types in roundings:
                config = gate_and_mul.gate_and_mul_config(False, model.num_heads * model.head_dim, rounds)
                yield launch(gate_and_mul._gate_and_mul_kernel, config, **types)
            for ranks in (1, 8):
                config = gated_delta.head_config(16 // ranks, model.value_heads // ranks, 128, 128)
                yield launch(gated_delta._gated_delta_kernel, config | gated_delta.TOKEN_CONFIG)
                yield launch(gated_delta._prepare_chunks_kernel, config | gated_delta.chunk_config(dtype))
                yield launch(gated_delta._run_chunks_kernel, config | gated_delta.run_config(dtype))
        if model.expert_size:
            has_shared = model.value_heads > 0
            config = route.choose_experts_config(model.num_experts, 8, True)
            # The gate of a shared expert stands in the same rows as the logits of the router.
            yield launch(route._choose_experts_kernel, config, **({"logits_stride": "i32"} if has_shared else {}))
            yield launch(route._sort_pairs_kernel, route.sort_pairs_config(8))
            yield launch(combine._combine_experts_kernel, combine.combine_config(8, has_shared))
            experts = lay(Form(16, 0), 1024, experts=model.num_experts)
            for num_tokens in (1, 128, 512, 1024):
                for gather in (True, False):
                    kernel, config, types = product_launch(experts, num_tokens, itemsize, gather=gather)
                    yield launch(kernel, config, **types)
    if dtype == torch.bfloat16 and arch != 89:  # as on sm_80
        for group, head_dim, cache, variant in VARIANTS:
            yield from launch_attention(group, head_dim, block_sizes[0], cache, variant, ahead=True)
    for kernel, config, types in quantized_launches(len(block_sizes) > 1, itemsize):
        yield launch(kernel, config, **types)
    if itemsize == 2:
        for config, types in few_rows_launches():
            yield launch(product._product_kernel, config, **types)
    for (rounds, types), size in itertools.product(roundings, (3072, gate_and_mul.LARGEST_BLOCK)):
        yield launch(gate_and_mul._gate_and_mul_kernel, gate_and_mul.gate_and_mul_config(True, size, rounds), **types)
    num_chunks = -(-VOCAB_SIZE // sample.CHUNK)
    # Edited logits are float32.
    for kind, pointer in {dtype: own, torch.float32: "*fp32"}.items():
        yield launch(sample._stats_kernel, sample.stats_config(), logits_ptr=pointer, part_max_ptr=pointer)
        config = sample_filter.filter_config(num_chunks, sample.CHUNK, kind)
        yield launch(sample_filter._filter_kernel, config, logits_ptr=pointer, part_max_ptr=pointer)
        config = token_logprobs.token_logprobs_config()
        yield launch(token_logprobs._token_logprobs_kernel, config, logits_ptr=pointer)
        yield launch(sample._draw_kernel, sample.draw_config(num_chunks), logits_ptr=pointer, token_ptr="*i32")
    for has_masks, has_counts in ((True, False), (False, True), (True, True)):
        config = edit_logits.edit_config(has_masks, has_counts)
        yield launch(edit_logits._edit_kernel, config, logits_ptr="*fp32")


def few_rows_launches() -> Iterator[tuple[dict[str, int | None], dict[str, str | None]]]:
    """Yield the constexprs and types of products of few rows: of qkv, o, gate and up, down and the head of 0.6B, 8B."""
    names = ("x_scales", *SCALES, "zeros", "tokens", "offsets", "bias", "residual")
    absent: dict[str, str | None] = {f"{name}_ptr": None for name in names}
    for hidden, queries, intermediate in ((1024, 2048, 3072), (4096, 4096, 12288)):
        for matrix, name in (
            ((queries + 2048, hidden), "bias"),
            ((VOCAB_SIZE, hidden), "bias"),
            ((hidden, queries), "residual"),
            ((hidden, intermediate), "residual"),
            ((2 * intermediate, hidden), "gate"),
        ):
            types = {pointer: kind for pointer, kind in absent.items() if pointer != f"{name}_ptr"}
            yield few_rows.few_rows_config(few_rows.cut_matrix(*matrix), name == "gate"), types


Named = tuple[Any, dict[str, int | None], dict[str, str | None]]
"""A kernel with its constexprs and the types of its pointers, None for one that is absent."""


SCALES = ("scales", "factors", "minima", "minima_factors")
"""The tensors of a matrix's scales and minima, in the order of a kernel's arguments."""


def lay(form: Form, in_size: int, experts: int = 0, rounds: bool = False) -> product.Laid:
    """Lay a matrix of 1,024 columns, or those of experts, without memory."""
    outer = (experts, 1024) if experts else (1024,)
    width = in_size * form.bits // 8 if form.bits < 16 else in_size
    codes = torch.empty(*outer, width, dtype=torch.int8 if form.bits == 8 else torch.uint8, device="meta")
    group_size = form.group_size or in_size

    def lay_groups(shared: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*outer[:-1], in_size // group_size // shared, 1024, dtype=dtype, device="meta")

    scales = product.LaidScales()
    if form.shared:
        factors = lay_groups(1, torch.int8) if form.shared > 1 else None
        scales = product.LaidScales(lay_groups(form.shared, torch.float16), factors, form.shared)
    elif form.bits < 16:
        scales = product.LaidScales(lay_groups(1, torch.float32))
    zeros = lay_groups(1, torch.int32) if form.has_zeros else None
    laid = product.Laid(codes, form.bits, group_size, scales, zeros, rounds, numbers=form.numbers)
    return laid._replace(minima=scales) if form.has_minima else laid


def read_types(laid: product.Laid) -> dict[str, str | None]:
    """Return the types of what a kernel reads of a matrix, where they differ from the usual."""
    if laid.bits == 16:
        return dict.fromkeys([f"{name}_ptr" for name in (*SCALES, "zeros")])
    usual = {torch.int8: "*i8", torch.uint8: "*u8", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
    types: dict[str, str | None] = {}
    for name, tensor in zip(("weight", *SCALES, "zeros"), laid.tensors, strict=True):
        kind = None if tensor is None else usual[tensor.dtype]
        if kind is None or kind != _POINTERS.get(f"{name}_ptr"):
            types[f"{name}_ptr"] = kind
    return types


def product_launch(
    laid: product.Laid, num_rows: int, itemsize: int, gather: bool = False, has_bias: bool = False
) -> Named:
    """Return the product of so many rows, or tokens."""
    types = read_types(laid)
    types |= {"x_ptr": "*i8", "partial_ptr": "*i32"} if laid.rounds else {"x_scales_ptr": None}
    exists = {"bias": has_bias, "residual": False, "tokens": gather, "offsets": laid.weight.dim() > 2}
    types |= {f"{name}_ptr": None for name, is_there in exists.items() if not is_there}
    config = product.product_config(laid, product.choose_tile(laid, num_rows, itemsize))
    return product._product_kernel, config, types


def quantized_launches(is_whole: bool, itemsize: int) -> Iterator[Named]:
    """Yield the kernels of quantised matrices and experts."""
    blocks = tuple(BLOCKS.values())
    for form in (*FORMATS, *blocks) if is_whole else (*FORMATS[:2], *blocks[:2]):
        matrix = lay(form, 1024)
        for num_rows in (1, 64, 65):
            yield product_launch(matrix, num_rows, itemsize, has_bias=num_rows == 64)
        yield dequantize._dequantize_kernel, dequantize.dequantize_config(matrix), read_types(matrix)
        experts = lay(form, 1024, experts=128)
        for num_tokens in (1, 512, 1024) if is_whole else (1,):
            yield product_launch(experts, num_tokens, itemsize, gather=num_tokens != 512)
    yield product_launch(lay(Form(8, 0), 1000), 64, itemsize)  # rows that end within a step
    # The output of attention of 0.6B; the most numbers that a gate leaves to this kernel in a model of today.
    for size in (2048, 32768):
        yield round_inputs._round_inputs_kernel, round_inputs.round_config(size), {"codes_ptr": "*i8"}
    matrix = lay(Form(8, 0), 1024, rounds=True)
    for num_rows in (1, 64, 65):
        yield product_launch(matrix, num_rows, itemsize, has_bias=num_rows == 64)
    experts = lay(Form(8, 0), 1024, experts=128, rounds=True)
    for num_tokens in (1, 512, 1024) if is_whole else (1, 1024):
        yield product_launch(experts, num_tokens, itemsize, gather=num_tokens == 1)


def keep_largest(launches: Iterable[Launch]) -> list[Launch]:
    """Of launches that differ in numbers alone, keep the one with the largest: it needs most registers and memory.

    Whether a number is 0 often decides which lines are compiled, so that counts as a difference, and so do flags.
    """
    largest: dict[Any, Launch] = {}
    for launch in launches:
        names = tuple((name, value if isinstance(value, bool) else bool(value)) for name, value in launch.config)
        kind = (launch.kernel, launch.types, launch.own, names)
        if kind not in largest or _multiply_numbers(launch) > _multiply_numbers(largest[kind]):
            largest[kind] = launch
    return list(largest.values())


def _multiply_numbers(launch: Launch) -> float:
    return math.prod(value for _, value in launch.config if value)


def compile_launch(launch: Launch, arch: int) -> dict[str, Any]:
    """Compile, and read from the result its registers, stack (where spills go), shared memory and instructions."""
    config = {**dict(launch.config), "PDL": arch >= 90, "launch_pdl": arch >= 90}
    options = {
        option: config.pop(option)
        for option in ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
        if option in config
    }
    names = launch.kernel.arg_names
    overrides = dict(launch.types)
    signature = {}
    attrs = {}
    for i, name in enumerate(names):
        if name in config:
            signature[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            signature[name] = overrides.get(name) or _POINTERS.get(name, launch.own)
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
        is_number = not name.endswith("_ptr")
        if name.endswith(("_ptr", "stride", "start", "size", "experts")) and not (is_number and name in overrides):
            # These are multiples of 16, and specialised as such.
            attrs[(i,)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in config.items()}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    name = launch.kernel.fn.__name__
    usage = inspect_binary(compiled.asm["cubin"], counts=name in COUNTED)
    result = {"kernel": name, "arch": arch, "own": launch.own, "config": dict(launch.config)}
    ptx = compiled.asm["ptx"]
    loads = re.findall(r"\bld\.global\S*\.[bu](\d+)", ptx)
    usage |= {
        "narrow_loads": loads.count("16"),
        "wide_loads": len(re.findall(r"\bld\.global\S*\.v4", ptx)),
        "dependent": compiled.metadata.launch_pdl,
        "asked_ahead": len(re.findall(r"\bprefetch\.", ptx.partition("griddepcontrol.wait")[0])),
        "order": re.findall(r"griddepcontrol\.\w+|\b(?:ld|st|atom|red|cp)\.\S*global", ptx)[:3],
    }
    return {**result, "types": overrides, "shared": compiled.metadata.shared, **usage}


def inspect_binary(cubin: bytes, counts: bool) -> dict[str, int]:
    """Return registers and bytes of stack of a thread, by Triton's own cuobjdump, and the number of instructions.

    They are counted on request: to take a kernel apart takes half a second.
    """
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def ask(option: str) -> str:
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = ask("-res-usage")
        code = ask("-sass") if counts else ""
    found = {name.lower(): int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK")}  # type: ignore[index]
    if counts:
        found["fused"] = code.count(" FFMA")
        found["instructions"] = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)", code, re.MULTILINE))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", action="store_true", help="the largest of each kind")
    parser.add_argument("--quick", action="store_true", help="the largest of each kind, of three models")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("arch", nargs="+", type=int, choices=sorted(SHARED_KIB))
    args = parser.parse_args()
    results = []
    for arch in args.arch:
        models = {name: MODELS[name] for name in ("0.6B", "30B-A3B", "Qwen3.5 35B-A3B")} if args.quick else MODELS
        block_sizes = BLOCK_SIZES[:1] if args.quick else BLOCK_SIZES
        dtype = getattr(torch, args.dtype)
        chosen = list(dict.fromkeys(launches(models, block_sizes, arch, dtype)))
        if args.quick or args.largest:
            chosen = keep_largest(chosen)
        for launch in chosen:
            results.append(compile_launch(launch, arch))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
