"""Triton's interpreter with products as a card has them, and with calls and types that cost a third.

It multiplies blocks with numpy, whose library sums a row otherwise where it stands at another place of the block, on
some processors only: here there is one chain of sums over K for each number, in its order. And for each function that a
kernel calls it replaces the words of Triton's language anew; here it does where they are not, which is once. An error
in such a function is wrapped once, by the kernel. What it makes of the shape of each block it makes once of a shape.
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
    _make_types_once(interpreter, core)
    _leave_out_what_changes_nothing(type(interpreter.interpreter_semantic))


def _make_types_once(interpreter: Any, core: Any) -> None:
    """Shapes of blocks, and numpy's types, from tables: each operation asks for several of them."""
    plain, plain_dtype = core.block_type.__init__, interpreter._get_np_dtype
    shapes: dict[Any, tuple[Any, int, Any, Any]] = {}
    dtypes: dict[str, Any] = {}
    of_scalars = core.tuple([]), core.constexpr(1)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes not in shapes:
            plain(self, element_ty, shape)
            of_tensors = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(self.numel)
            shapes[sizes] = self.shape, self.numel, str(self.shape), of_tensors
        self.shape, self.numel, text, self.of_tensors = shapes[sizes]
        self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else of_scalars

    def numpys(kind: Any) -> Any:
        if kind.name not in dtypes:
            dtypes[kind.name] = plain_dtype(kind)
        return dtypes[kind.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block_type, tensor, numpys


def _leave_out_what_changes_nothing(semantic: Any) -> None:
    """Whether an integer overflows, which is computed for each sum and told in debug mode only; equal shapes as one."""
    plain = semantic.broadcast_impl_value

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        alike = left.type.is_block() and right.type.is_block() and left.shape is right.shape
        return (left, right) if alike else plain(self, left, right)

    semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    semantic.broadcast_impl_value = broadcast
