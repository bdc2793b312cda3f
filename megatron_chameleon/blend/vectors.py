"""Vectors of int32 for numba's kernels.

Whether LLVM makes vector instructions of a loop hangs on the number of domains and on its version.
These are vector instructions to begin with, which LLVM splits into what the processor has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.extending import intrinsic, models, register_model

LANES = 32
"""Numbers in a vector. More would hide more of the instructions' latency, but what the lanes give
is written to as many places in memory."""

INT32 = ir.IntType(32)
LLVM_VECTOR = ir.VectorType(INT32, LANES)

Emitted = tuple[Any, Callable[..., Any]]


class Int32Vector(types.Type):
    """``LANES`` int32."""

    def __init__(self) -> None:
        super().__init__(name=f"Int32Vector{LANES}")


@register_model(Int32Vector)
class _Int32VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Int32Vector) -> None:
        super().__init__(manager, numba_type, LLVM_VECTOR)


VECTOR = Int32Vector()


@intrinsic
def load(_: Any, array: Any, place: Any) -> Emitted:
    """``load(array, place)``: the vector of ``array[place : place + LANES]``, int32."""

    def emit(context: BaseContext, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        pointer = pointer_to(context, builder, array, arguments, LLVM_VECTOR)
        return builder.load(pointer, align=4)

    return VECTOR(array, types.int64), emit


@intrinsic
def store(_: Any, array: Any, place: Any, vector: Any) -> Emitted:
    """``store(array, place, vector)``: write it to ``array[place : place + LANES]``, int32."""

    def emit(context: BaseContext, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        pointer = pointer_to(context, builder, array, arguments[:2], LLVM_VECTOR)
        builder.store(arguments[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), emit


@intrinsic
def store_int16(_: Any, array: Any, place: Any, vector: Any) -> Emitted:
    """``store_int16(array, place, vector)``: :func:`store` of the lower halves, in int16."""

    def emit(context: BaseContext, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        narrow = ir.VectorType(ir.IntType(16), LANES)
        pointer = pointer_to(context, builder, array, arguments[:2], narrow)
        builder.store(builder.trunc(arguments[2], narrow), pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), emit


@intrinsic
def splat(_: Any, number: Any) -> Emitted:
    """``splat(number)``: a vector of one int32 everywhere."""

    def emit(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        empty = ir.Constant(LLVM_VECTOR, ir.Undefined)
        zeros = ir.Constant(LLVM_VECTOR, [0] * LANES)
        vector = builder.insert_element(empty, arguments[0], ir.Constant(INT32, 0))
        return builder.shuffle_vector(vector, empty, zeros)

    return VECTOR(types.int32), emit


def _of_two(instruction: str) -> Any:
    """``apply(one, other)``: one of LLVM's instructions on two vectors."""

    @intrinsic
    def apply(_: Any, one: Any, other: Any) -> Emitted:
        def emit(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
            return getattr(builder, instruction)(*arguments)

        return VECTOR(one, other), emit

    return apply


# Sums and differences are modulo 2**32.
add, subtract, bits_of_both, bits_of_either = map(_of_two, ("add", "sub", "and_", "or_"))


@intrinsic
def where_greater(_: Any, one: Any, other: Any, chosen: Any, otherwise: Any) -> Emitted:
    """``where_greater(one, other, a, b)``: ``a`` in the lanes where one > other, else ``b``."""

    def emit(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        greater = builder.icmp_signed(">", *arguments[:2])
        return builder.select(greater, *arguments[2:])

    return VECTOR(one, other, chosen, otherwise), emit


def pointer_to(
    context: BaseContext, builder: ir.IRBuilder, kind: Any, where: Any, vector: Any
) -> Any:
    """LLVM's pointer to a ``vector`` type in an array of numba type ``kind``.

    ``where`` are the LLVM values of the array and of the place in it.
    """
    array, place = where
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [place]), vector.as_pointer())
