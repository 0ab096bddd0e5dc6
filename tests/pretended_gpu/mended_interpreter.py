"""Triton's interpreter with products as a card has them, and with calls of functions that cost a third less.

It multiplies blocks with numpy, whose library sums a row otherwise where it stands at another place of the block, on
some processors only: here there is one chain of sums over K for each number, in its order. And for each function that a
kernel calls it replaces the words of Triton's language anew; here it does where they are not, which is once. An error
in such a function is wrapped once, by the kernel.
"""

from __future__ import annotations

from typing import Any


def mend(interpreter: Any) -> None:
    """Have an interpreter (the module) sum and call so from now on."""
    builder, plain = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if any(one.dtype.primitive_bitwidth == 8 for one in (a, b)):
            return plain(self, a, b, d, *how)
        total = d.data
        for k in range(a.data.shape[-1]):
            total = total + a.data[..., :, k : k + 1].astype(total.dtype) * b.data[..., k : k + 1, :].astype(
                total.dtype
            )
        return interpreter.TensorHandle(total, d.dtype.scalar)

    builder.create_dot = dot
    core = interpreter.tl.core

    def call(self: Any, *args: Any, **named: Any) -> Any:
        if core.is_builtin(core.load):  # the beginning of a kernel leaves out what the language's own functions use
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **named)

    interpreter.InterpretedFunction.__call__ = call
