"""Operations of a program one at a time, as compiled code calls them; and operations that are written in Python."""

import ctypes

import numpy as np
import torch

from domainpar.nn import operations
from domainpar.nn.program import MOST_OPERANDS

CODE = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, ctypes.c_int64)
NUMBERS = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16}
KINDS = {np.dtype(numbers): kind for kind, numbers in NUMBERS.items()}


def call(kernel, *operands, first=0, count):
    """Do an operation with some rows.

    Args:
        kernel: Its address.
        operands: Arrays, of which an empty one is nothing, and integers.
        first, count: Which rows; those of the arrays begin with the first.
    """
    arguments = np.zeros(MOST_OPERANDS, np.int64)
    for position, operand in enumerate(operands):
        arguments[position] = _as_integer(operand)
    CODE(kernel)(arguments.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)), first, count)


def _as_integer(operand):
    if not isinstance(operand, np.ndarray):
        return (int(operand) + 2**63) % 2**64 - 2**63  # keys of 64 bits
    assert operand.flags.c_contiguous
    return operand.ctypes.data if operand.size else 0


def multiply(rows, count, weight, out, add):
    """`products.multiply`."""
    kernel = operations.multiply_rows(KINDS[rows.dtype], KINDS[out.dtype])
    call(kernel, rows, rows.shape[1], weight, out, out.shape[1], add, count=count)


def outer(rows, gradient, count, out):
    """`products.outer`."""
    kernel = operations.outer_of_rows(KINDS[rows.dtype], KINDS[gradient.dtype])
    call(kernel, rows, rows.shape[1], gradient, gradient.shape[1], out, count=count)


_alive = []


def in_python(function):
    """Address of an operation `function(arguments, first, count)`; an error in it is only printed."""
    _alive.append(CODE(function))
    return ctypes.cast(_alive[-1], ctypes.c_void_p).value


def table_at(address, rows, columns, kind):
    """The table at an address, which may be written to; bfloat16 as uint16."""
    if address == 0 or rows * columns == 0:
        return np.zeros((0, columns), NUMBERS[kind])
    numbers = np.dtype(NUMBERS[kind])
    memory = (ctypes.c_char * (rows * columns * numbers.itemsize)).from_address(address)
    return np.frombuffer(memory, numbers).reshape(rows, columns)
