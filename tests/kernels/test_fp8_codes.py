"""Products by fp8 codes are those of the dequantised matrix: in the interpreter, or on a GPU where there is one."""

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from helpers.kernel_cases import DEVICE, HALF, poisoned_memory, randn
from helpers.quantized_cases import make_floats

pytest.importorskip("triton")

from nanovllm.backends.gpu import fp8_codes
from nanovllm.backends.gpu.fp8_codes import read_fp8
from nanovllm.backends.gpu.quantized import TritonExperts, TritonMatrix
from nanovllm.backends.gpu.quantized_linear import split_steps
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.features.families.qwen3_moe.ops import Routing, grouped_linear_reference, route_reference

EVERY_CODE = torch.arange(256, dtype=torch.uint8)
NUMBERS = EVERY_CODE.view(torch.float8_e4m3fn).float()


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck():
    with poisoned_memory():
        yield


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding. Both sum in float32, in another order: some hundred products of about one."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), expected.float(), rtol=2 * eps, atol=2 * eps + 1e-4)


@triton.jit
def _read_kernel(codes_ptr, numbers_ptr, TYPE: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(numbers_ptr + i, read_fp8(tl.load(codes_ptr + i), TYPE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_code_is_read_as_its_number(dtype: torch.dtype) -> None:
    numbers = torch.empty(256, dtype=dtype, device=DEVICE)
    _read_kernel[(1,)](EVERY_CODE.to(DEVICE), numbers, getattr(tl, str(dtype).removeprefix("torch.")))
    is_number = NUMBERS.isfinite()
    assert torch.equal(numbers.float().cpu()[is_number], NUMBERS[is_number])
    assert torch.equal(numbers.cpu().signbit()[is_number], NUMBERS.signbit()[is_number])


def multiply_halves(a: int, b: int, c: int) -> int:
    """fma.rn.bf16x2: of each half of 16 bits."""
    found = 0
    for place in (0, 16):
        halves = torch.tensor([a >> place & 0xFFFF, b >> place & 0xFFFF, c >> place & 0xFFFF]).to(torch.uint16)
        x, y, z = halves.view(torch.bfloat16).double()
        found |= int((x * y + z).to(torch.bfloat16).view(torch.uint16)) << place
    return found


def permute_bytes(a: int, b: int, selector: int) -> int:
    some = (a | b << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(some[selector >> 4 * i & 7] for i in range(4)), "little")


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": permute_bytes,
    "shr.b32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if table == 0xEA else -1,
    "fma.rn.bf16x2": multiply_halves,
}


def test_the_assembly_reads_every_code_as_its_number() -> None:
    """It has no interpreter, so its instructions are followed here, one after another."""
    lines = re.findall(r"^\s+([a-z0-9.]+) ([^;{}]+);$", inspect.getsource(fp8_codes._read_fours.fn), re.MULTILINE)
    instructions = [line for line in lines if line[0] != ".reg"]
    assert len(instructions) == 12
    found = []
    for first in range(0, 256, 4):
        registers = {"$2": int.from_bytes(bytes(range(first, first + 4)), "little")}
        for operation, operands in instructions:
            target, *sources = operands.split(", ")
            values = [registers[source] if source in registers else int(source, 0) for source in sources]
            registers[target] = OPERATIONS[operation](*values)
        found += [registers["$0"] & 0xFFFF, registers["$0"] >> 16, registers["$1"] & 0xFFFF, registers["$1"] >> 16]
    numbers = torch.tensor(found).to(torch.uint16).view(torch.bfloat16).float()
    is_number = NUMBERS.isfinite()
    assert torch.equal(numbers[is_number], NUMBERS[is_number])
    assert torch.equal(numbers.signbit()[is_number], NUMBERS.signbit()[is_number])
    assert numbers.isfinite().all()


@pytest.mark.parametrize(("in_size", "group_size"), [(200, 0), (256, 128), (320, 128), (256, 32)])
@pytest.mark.parametrize(("num_rows", "dtype"), [(5, HALF), (40, torch.float32), (129, HALF)])
def test_products_are_those_of_the_dequantised_matrix(
    num_rows: int, in_size: int, group_size: int, dtype: torch.dtype
) -> None:
    """Many rows meet weights that are rounded to the dtype."""
    codes = make_floats((70, in_size), group_size)
    bias = randn(70, dtype=dtype)
    x = randn(num_rows, in_size, dtype=dtype)
    weights = codes.dequantize()
    if num_rows > 128:
        weights = weights.to(dtype).float()
    assert_close(TritonMatrix(codes, dtype).multiply(x, bias), (x.float() @ weights.T + bias.float()).to(dtype))


def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    """In the interpreter numpy multiplies tiles of any height row by row, so what differs could only be our order.

    Three programs sum a part of the nine groups each.
    """
    codes = make_floats((20, 1152), 128)
    assert split_steps(1152, 20, 128) == (3, 4)
    matrix = TritonMatrix(codes, torch.float32)
    x = randn(65, 1152)
    expected = torch.cat([matrix.multiply(row, None) for row in x[:3].split(1)])
    for num_rows in (3, 16, 17, 65):
        found = matrix.multiply(x[:num_rows], None)[:3]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("group_size", [0, 128])
def test_rows_are_those_of_the_dequantised_matrix(group_size: int) -> None:
    codes = make_floats((24, 256), group_size)
    indices = torch.tensor([23, 1, 1, 0], device=DEVICE)
    assert torch.equal(TritonMatrix(codes, HALF).rows(indices), codes.dequantize()[indices].to(HALF))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "group_size", "gather"), [(1, 5, 128, True), (40, 3, 0, False), (150, 2, 128, True)]
)
def test_experts_products_are_their_reference(num_tokens: int, num_experts: int, group_size: int, gather: bool) -> None:
    codes = make_floats((num_experts, 40, 256), group_size)
    slots = torch.arange(num_tokens, device=DEVICE)
    slots[num_tokens // 2 :: 7] = -1
    routing: Routing = route_reference(randn(num_tokens, num_experts, seed=3), 2, True, slots)
    num_pairs = int(routing.offsets[-1])
    x = randn(num_tokens if gather else num_tokens * 2, 256)
    got = TritonExperts(codes).multiply(x, routing, gather)[:num_pairs]
    assert_close(got, grouped_linear_reference(x, codes.dequantize(), routing, gather)[:num_pairs])


def test_groups_that_no_step_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32 weights, and these have 48: use attention_backend"):
        TritonMatrix(make_floats((8, 96), 48), HALF)
