"""The C++ kernels on this processor, with the instructions that it has: shapes and numbers of threads are drawn.

`FUZZ_DRAWS=1000 FUZZ_SEED=7 pytest -m slow` tries more of them.
"""

import os
import random

import pytest
import torch
from helpers.cpu_checks import (
    BF16,
    CPU,
    FP32,
    assert_attends_alike,
    attend_after_storing,
    check_packed_products,
    make_variant,
)
from helpers.dynamic_checks import check_dynamic_products
from helpers.quantized_checks import FORMATS, check_quantized_experts, check_quantized_products

from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.library import cpu_library

if reason := CpuBackend.why_cannot(CPU):
    pytest.skip(reason, allow_module_level=True)

DRAWS = int(os.environ.get("FUZZ_DRAWS", "12"))
SEED = os.environ.get("FUZZ_SEED", "0")


@pytest.mark.parametrize("num_draws", [3, pytest.param(DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["products", "attention", "dynamic", "quantised", "experts"])
def test_any_shape_with_any_number_of_threads_gives_the_reference(kind: str, num_draws: int) -> None:
    """A failure prints its draw. Attention also has the same bits whatever the threads."""
    rng = random.Random(f"{kind} {SEED} {num_draws}")
    backend = CpuBackend()
    threads = torch.get_num_threads()
    try:
        for _ in range(num_draws):
            torch.set_num_threads(rng.choice((1, 2, 3, 5)))
            dtype = rng.choice((BF16, FP32))
            in_features = 2 * rng.randrange(1, 500)
            out_features = rng.randrange(1, 700)
            shape = (32 * rng.randrange(1, 9), rng.randrange(1, 17), 2 ** rng.randrange(4, 9))
            name = rng.choice([*FORMATS])
            print(kind, torch.get_num_threads(), dtype, in_features, out_features, shape, name)
            if kind == "products":
                check_packed_products(cpu_library(), dtype, in_features, out_features)
            elif kind == "attention":
                kv_dtype = rng.choice((dtype, torch.int8))
                kind = (rng.choice((None, rng.randrange(1, 300))), rng.choice((None, 1.5, 30.0)), rng.random() < 0.5)
                variant = make_variant(kind, 2 * shape[1])
                print(kv_dtype, variant)
                assert_attends_alike(backend, shape, dtype, kv_dtype, variant)
                lengths = [rng.randrange(1, 200) for _ in range(rng.randrange(1, 9))]
                found = []
                for count in (1, torch.get_num_threads()):
                    torch.set_num_threads(count)
                    queries = [1] * len(lengths)
                    found.append(attend_after_storing(backend, queries, lengths, shape, dtype, kv_dtype, variant))
                assert torch.equal(*found)
            elif kind == "dynamic":
                check_dynamic_products(in_features, out_features, dtype, seed=rng.randrange(1 << 30))
            elif kind == "quantised":
                check_quantized_products(name, dtype, 4 * in_features, out_features)
            else:
                check_quantized_experts(name, dtype, 4 * in_features, out_features)
    finally:
        torch.set_num_threads(threads)
