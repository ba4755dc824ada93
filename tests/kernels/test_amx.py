"""Products by AMX, the matrix unit of Intel's processors: they are used, sum in the order that cpu/amx.h names, and the
kernels do without them where the system says no.

test_processors.py builds the kernels without AMX; the other tests of kernels run with it where the processor has it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.cpu_checks import BF16
from helpers.paths import ROOT, TESTS
from torch import Tensor

from nanovllm.backends.cpu.backend import NativeMatrix
from nanovllm.backends.cpu.library import cpu_library
from nanovllm.backends.cpu.scratch import Scratch

FACTS = Path("/proc/cpuinfo")
if not FACTS.exists() or not {"amx_tile", "amx_bf16", "amx_int8"} <= set(FACTS.read_text().split()):
    pytest.skip("needs a processor that has AMX", allow_module_level=True)

STEP = 32
"""Inputs that one instruction multiplies."""


def sum_by_steps(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in the order of AMX. A product of two bfloat16 numbers is exact in float32."""
    total = torch.zeros(len(x), len(weight))
    for start in range(0, x.shape[1], STEP):
        halves = torch.zeros(2, *total.shape)
        for i in range(start, start + STEP):
            halves[i % 2] += x[:, i, None].float() * weight[:, i].float()
        total += halves[0] + halves[1]
    return total


def test_sums_have_the_order_that_the_source_names() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 512).to(BF16)
    x = torch.randn(70, 512).to(BF16)
    got = NativeMatrix(cpu_library(), weight, Scratch()).multiply(x, None)
    assert torch.equal(got, sum_by_steps(x, weight).to(BF16))
    in_another_order = sum_by_steps(x.flip(1), weight.flip(1)).to(BF16)
    assert not torch.equal(got, in_another_order), "the comparison can tell orders apart"


CHECK = """
import ctypes
import sys

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

# Linux gives AMX only to processes whose stacks for signals have room for its registers.
system = ctypes.CDLL(None, use_errno=True)
if sys.argv[1] == "small":
    memory = ctypes.create_string_buffer(8192)
    stack = Stack(ctypes.addressof(memory), 0, len(memory))
    assert system.sigaltstack(ctypes.byref(stack), None) == 0, ctypes.get_errno()

import torch
from helpers.cpu_checks import check_packed_products
from helpers.dynamic_checks import check_dynamic_products
from helpers.quantized_checks import check_quantized_products
from nanovllm.backends.cpu.library import cpu_library

for dtype in (torch.bfloat16, torch.float32):
    check_packed_products(cpu_library(), dtype, 208, 50)
    check_quantized_products("int8 at load", dtype, 208, 50)
    check_dynamic_products(208, 50, dtype)
allowed = ctypes.c_uint64()
ARCH_PRCTL, GET_PERMISSION, TILE_DATA = 158, 0x1022, 18
assert system.syscall(ARCH_PRCTL, GET_PERMISSION, ctypes.byref(allowed)) == 0
print("AMX" if allowed.value >> TILE_DATA & 1 else "no AMX")
"""


@pytest.mark.parametrize(("signal_stack", "expected"), [("usual", "AMX"), ("small", "no AMX")])
def test_the_kernels_ask_for_amx_and_do_without_where_it_is_refused(signal_stack: str, expected: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)])}
    command = [sys.executable, "-c", CHECK, signal_stack]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == expected.split()
    assert ("does not let this process use AMX" in done.stderr) == (signal_stack == "small")
