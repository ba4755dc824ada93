"""Triton's interpreter, extended: launches go to the card, and bfloat16 is computed as rounded float32.

The interpreter keeps bfloat16 as its bits and calculates with these as if they were integers.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from helpers.quick_interpreter import quicken
from helpers.rehearsal.card import Card


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to the nearest bfloat16; of two equally near, to the even one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(x), x, rounded.astype(np.uint32).view(np.float32)).astype(np.float32)


def to_bits(x: np.ndarray) -> np.ndarray:
    return (round_to_bfloat16(x).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def is_bfloat16(dtype: Any) -> bool:
    return bool(dtype.scalar == tl.bfloat16)


@contextmanager
def extended(card: Card) -> Iterator[None]:
    """Within, kernels run on the card, in bfloat16 too."""
    quicken()
    np_dtype = interpreter._get_np_dtype
    convert = interpreter._convert_float
    call = GridExecutor.__call__
    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store
    cast = InterpreterBuilder.cast_impl
    bitcast = InterpreterBuilder.create_bitcast
    fits = interpreter._validate_np_data_size

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        card.launch(lambda *host_args: call(self, *host_args, **kwargs), args)

    def dtype_of(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.float32) if element == tl.bfloat16 else np_dtype(dtype)

    def fits_or_is_wide(data: Any, dtype: Any) -> bool:
        return is_bfloat16(dtype) or fits(data, dtype)

    def convert_float(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if is_bfloat16(target):
            wide = x if is_bfloat16(source) or source == tl.float32 else x.astype(np.float32)
            return round_to_bfloat16(wide)
        return x.astype(np_dtype(target)) if is_bfloat16(source) else convert(x, source, target, rounding)

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *policy: Any) -> Any:
        if not is_bfloat16(pointers.get_element_ty()):
            return load(self, pointers, mask, other, *policy)
        filler = np.zeros_like(pointers.data, np.uint16) if other is None else to_bits(other.data)
        found = interpreter._interpreter.load(pointers.data, mask.data, filler, np.dtype(np.uint16))
        return TensorHandle(from_bits(found), tl.bfloat16)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *policy: Any) -> Any:
        if not is_bfloat16(pointers.get_element_ty()):
            return store(self, pointers, value, mask, *policy)
        return interpreter._interpreter.store(pointers.data, to_bits(value.data), mask.data)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if not is_bfloat16(target):
            return cast(self, source, target)
        return TensorHandle(round_to_bfloat16(source.data.astype(np.float32)), tl.bfloat16)

    def create_bitcast(self: Any, source: Any, target: Any) -> Any:
        if is_bfloat16(source.dtype) or is_bfloat16(target):
            raise NotImplementedError("no kernel reads the bits of bfloat16")
        return bitcast(self, source, target)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
        for name, stand_in in (
            ("_get_np_dtype", dtype_of),
            ("_convert_float", convert_float),
            ("_validate_np_data_size", fits_or_is_wide),
        ):
            patches.enter_context(mock.patch.object(interpreter, name, stand_in))
        for name, stand_in in (
            ("create_masked_load", masked_load),
            ("create_masked_store", masked_store),
            ("cast_impl", cast_impl),
            ("create_bitcast", create_bitcast),
        ):
            patches.enter_context(mock.patch.object(InterpreterBuilder, name, stand_in))
        # A class attribute of its own, although it is the same function.
        for name in ("create_fp_ext", "create_fp_trunc", "create_si_to_fp", "create_ui_to_fp"):
            patches.enter_context(
                mock.patch.object(InterpreterBuilder, name, lambda self, x, to: self.cast_impl(x, to))
            )
        yield
