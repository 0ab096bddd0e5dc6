"""Matrix products: of each row with weights, of rows with themselves, and products that sum over rows."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

from torch import Tensor

from domainpar.nn.adapt.across import summed
from domainpar.nn.adapt.calls import Call, axis_and_freshness, one_axis, words
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.rows import NotExact, Rows, mark
from domainpar.nn.adapt.rules.elementwise import find_place, without_rows
from domainpar.nn.adapt.watch import Watch, rule


@rule("linear", takes="input")
@rule("bilinear", takes="input1")
def linear(watch: Watch, call: Call) -> Any:
    """Each row times weights that every rank has."""
    num_inputs = 2 if call.name == "bilinear" else 1
    known = [watch.rows(tensor) for tensor in call.args[:num_inputs]]
    if any(rows is None or rows.dim == tensor.dim() - 1 for rows, tensor in zip(known, call.args)):
        raise NotExact(
            f"torch.{call.name} sums over rows, or has weights that are dealt over the ranks; write it as a matmul."
        )
    if any(watch.rows(weight) is not None for weight in tensors_in((call.args[num_inputs:], call.kwargs))):
        raise NotExact(f"torch.{call.name} has weights that are dealt over the ranks.")
    axis, fresh = axis_and_freshness(known, call.name)
    return mark(watch.common(call)(), Rows(axis, next(rows.dim for rows in known if rows), fresh))


@rule("matmul", "rmatmul", "mm", "bmm", "dot", "mv", takes="input other|mat2|vec|tensor")
def matmul(watch: Watch, call: Call) -> Any:
    """Products in which rows are a batch or the outer dimension; or are summed over, over all ranks."""
    left, right = call.get("input"), call.get("other")
    if call.name == "rmatmul":
        left, right = right, left
        call = replace(call, func=Tensor.matmul, name="matmul", args=[left, right])
    of_left, of_right = watch.rows(left), watch.rows(right)
    left_end = None if of_left is None else left.dim() - of_left.dim
    right_end = None if of_right is None else right.dim() - of_right.dim
    inner = 2 if right.dim() > 1 else 1
    if of_left and of_right and left_end == 1 and right_end == inner:
        axis = one_axis([of_left.axis, of_right.axis], call.name)
        return mark(summed(call.but(input=watch.counted(left), other=watch.counted(right))(), watch.part), None)
    if left_end == 1 or right_end == inner:
        raise NotExact("a matrix product sums over rows and something else that is not the same rows.")
    axis, fresh = axis_and_freshness([of_left, of_right], call.name)
    if of_left and of_right:
        if left_end != right_end or left_end is None or left_end < 3:
            raise NotExact(f"a matrix product of every one of the {axis.name} with every other one.")
        end_after = left_end
    elif of_left:
        assert left_end is not None
        _check_batch(left_end, right)
        end_after = left_end - (right.dim() == 1)
    else:
        assert right_end is not None
        _check_batch(right_end, left)
        end_after = right_end - (left.dim() == 1 and right_end > 1)
    result = watch.common(call)()
    return mark(result, Rows(axis, result.dim() - end_after, fresh))


def _check_batch(end: int, other: Tensor) -> None:
    if end >= 3 and other.dim() >= end and other.size(-end) != 1:
        raise NotExact("a batch of matrices that is the same on every rank meets rows.")


@rule("addmm", "baddbmm", "addmv", "addbmm", takes="input left|mat1|mat|batch1 right|mat2|vec|batch2")
def add_and_multiply(watch: Watch, call: Call) -> Any:
    """`beta * added + alpha * left @ right`."""
    if call.in_place or call.name == "addbmm":
        raise NotExact(f"torch.{call.name} of rows; write it as a sum and a product.")
    added, left, right = map(call.get, ("input", "left", "right"))
    with watch.in_other_words():
        return added * call.kwargs.get("beta", 1) + (left @ right) * call.kwargs.get("alpha", 1)


@rule(
    *words(
        "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_compressed_tensor to_sparse to_sparse_coo "
        "to_sparse_csr _sparse_mm"
    )
)
def sparse(watch: Watch, call: Call) -> Any:
    """Matrices of all nodes by all nodes."""
    raise NotExact(
        f"torch.{call.name.lstrip('_')}: a sparse matrix has rows and columns of the whole graph, which no rank has; "
        "give the layer edge_index, and weights of edges, which layers of PyG take as well."
    )


@rule("einsum")
def einsum(watch: Watch, call: Call) -> Any:
    """Products in Einstein's notation; a letter of rows that is summed over is summed over all ranks."""
    equation, operands = call.args[0], call.args[1:]
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    letters, output = _letters(equation, [operand.dim() for operand in operands])
    equation = f"{','.join(letters)}->{output}"
    known = [watch.rows(operand) for operand in operands]
    axis, fresh = axis_and_freshness(known, call.name)
    letter = {one[rows.dim] for one, rows in zip(letters, known) if rows}
    if len(letter) != 1:
        raise NotExact(f"torch.einsum multiplies every one of the {axis.name} with every other one.")
    row = letter.pop()
    if any(one.count(row) > 1 for one in letters):
        raise NotExact("torch.einsum takes the diagonal of rows by rows.")
    for one, operand, rows in zip(letters, operands, known):
        if rows is None and row in one and operand.size(one.index(row)) != 1:
            raise NotExact("torch.einsum puts a tensor that is the same on every rank beside rows.")
    if row in output:
        args = operands if fresh else [watch.owned(operand) for operand in operands]
        return mark(call.func(equation, *args), Rows(axis, output.index(row), fresh))
    return mark(summed(call.func(equation, *(watch.counted(operand) for operand in operands)), watch.part), None)


def _letters(equation: str, num_dims: list[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, also where "..." or no result is written."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow:  # what stands for other dimensions, then what occurs once, as torch sorts it
        alone = sorted(letter for letter in set(inputs) - set(",.") if inputs.count(letter) == 1)
        output = "..." * ("..." in inputs) + "".join(alone)
    spare = "".join(letter for letter in string.ascii_letters if letter not in equation)
    hidden = [num - len(one) + 3 for one, num in zip(operands, num_dims) if "..." in one]
    spare = spare[: max(hidden, default=0)]
    letters = [one.replace("...", spare[len(spare) - (num - len(one) + 3) :]) for one, num in zip(operands, num_dims)]
    return letters, output.replace("...", spare)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(watch: Watch, call: Call) -> Any:
    """A recurrent network along a dimension of features, a sequence for each row."""
    if isinstance(call.args[1], Tensor) and call.name != "gru" and call.args[1].dim() == 1:
        raise NotExact(f"torch.{call.name} of packed sequences.")
    rows = watch.rows(call.args[0])
    batch_first, dropout, train = call.args[-1], call.args[5], call.args[6]
    if rows is None or call.args[0].dim() != 3 or rows.dim != (0 if batch_first else 1):
        raise NotExact(f"torch.{call.name} runs along the rows; their order is the whole graph's, not one rank's.")
    if dropout and train:
        raise NotExact(f"dropout inside torch.{call.name}; put an nn.Dropout behind it.")
    given = [call.args[1]] if isinstance(call.args[1], Tensor) else list(call.args[1])
    of_states = [watch.rows(state) for state in given]
    if any(of is None or of.axis is not rows.axis or of.dim != 1 for of in of_states):
        raise NotExact(f"torch.{call.name} begins with states that are not of the same rows.")
    fresh = rows.fresh and all(of.fresh for of in of_states if of)
    output, *states = watch.common(call)()
    mark(output, rows.but(fresh=fresh))
    return (output, *(mark(state, Rows(rows.axis, 1, fresh)) for state in states))


@rule("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent_cell(watch: Watch, call: Call) -> Any:
    """One step of a recurrent network for each row."""
    states = list(call.args[1]) if isinstance(call.args[1], (tuple, list)) else [call.args[1]]
    known = [watch.rows(tensor) for tensor in [call.args[0], *states]]
    if any(rows is None or rows.dim != 0 for rows in known):
        raise NotExact(f"torch.{call.name} of rows and of something that is the same on every rank.")
    axis, fresh = axis_and_freshness(known, call.name)
    result = watch.common(call)()
    for tensor in tensors_in(result):
        mark(tensor, Rows(axis, 0, fresh))
    return result


@rule("conv1d", "conv2d", "conv3d", takes="input weight bias stride padding")
@rule(
    *words("conv_transpose1d conv_transpose2d conv_transpose3d"),
    takes="input weight bias stride padding output_padding",
)
@rule(
    *words("max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d"),
    takes="input kernel_size stride padding",
)
@rule(
    *words("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    *words("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"),
    takes="input output_size",
)
def convolution(watch: Watch, call: Call) -> Any:
    """A batch entry for each row; or rows along a dimension of the picture, where the kernel stays within one row."""
    given, count = call.get("input"), int(call.name[-2])
    rows = watch.rows(given)
    if rows is None or any(watch.rows(weight) is not None for weight in tensors_in((call.args[1:], call.kwargs))):
        raise NotExact(f"torch.{call.name} has weights that are dealt over the ranks.")
    first = given.dim() - count  # of the dimensions that the kernel runs along
    mixes_channels = "conv" in call.name and rows.dim == first - 1
    if mixes_channels or (rows.dim >= first and not _stays(call, rows.dim - first)):
        raise NotExact(
            f"torch.{call.name} runs along the rows; their order is the whole graph's, not one rank's. Rows may be the "
            "batch, or lie along a dimension where the kernel has length 1, the stride 1 and the padding 0."
        )
    return mark(without_rows(watch, call, [rows.dim]), rows.but())


def _stays(call: Call, along: int) -> bool:
    """Whether a kernel makes each entry along one of its dimensions of that entry only."""

    def of(value: Any) -> Any:
        return value[min(along, len(value) - 1)] if isinstance(value, (tuple, list)) else value

    if call.name.startswith("adaptive"):
        return of(call.get("output_size")) is None
    is_conv = "conv" in call.name
    kernel = call.get("weight").size(2 + along) if is_conv else of(call.get("kernel_size"))
    stride = of(call.get("stride", 1) if is_conv else call.get("stride") or kernel)
    padding = of(call.get("padding", 0))
    added = of(call.get("output_padding", 0)) if "transpose" in call.name else 0
    return bool(kernel == stride == 1 and padding in (0, "same", "valid") and added == 0)


BETWEEN_ROWS = (
    "attention between all rows of a graph (a transformer over nodes): every rank would need every row; use attention "
    "over edges (GATv2Conv, TransformerConv), or linear attention."
)


@rule("scaled_dot_product_attention", takes="query key value attn_mask dropout_p")
def attention(watch: Watch, call: Call) -> Any:
    """Attention between the entries of each row; between rows it would join everything with everything."""
    given = [call.get(name) for name in ("query", "key", "value", "attn_mask")]
    if any(rows.dim >= tensor.dim() - 2 for tensor in tensors_in(given) if (rows := watch.rows(tensor))):
        raise NotExact(BETWEEN_ROWS)
    if call.get("dropout_p", 0.0):
        raise NotExact("dropout inside scaled_dot_product_attention; put an nn.Dropout behind it.")
    place = find_place(watch, call)
    if call.kwargs.get("enable_gqa", False) and place.from_end == 3:
        raise NotExact("rows are the heads of grouped attention; give the rows a dimension of their own.")
    result = watch.common(call)()
    return mark(result, Rows(place.axis, result.dim() - place.from_end, place.fresh))


@rule(
    "multi_head_attention_forward",
    takes="query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn "
    "dropout_p out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask",
)
def multi_head_attention(watch: Watch, call: Call) -> Any:
    """`nn.MultiheadAttention`, whose inputs are [entries, batch, features] here: rows may be the batch."""
    given, padding = [call.get(name) for name in ("query", "key", "value")], call.get("key_padding_mask")
    known = [watch.rows(tensor) for tensor in given]
    if any(rows is not None and (tensor.dim() < 3 or rows.dim != 1) for rows, tensor in zip(known, given)):
        raise NotExact(BETWEEN_ROWS)
    others = [tensor for tensor in call.tensors if all(tensor is not one for one in (*given, padding))]
    of_padding = watch.rows(padding) if padding is not None else None
    if any(rows is None for rows in known) or (padding is not None and (of_padding is None or of_padding.dim != 0)):
        raise NotExact("attention of rows to what is the same on every rank; expand that to the rows: x.size(0).")
    if any(watch.rows(tensor) is not None for tensor in others) or (
        (mask := call.get("attn_mask")) is not None and mask.dim() > 2
    ):
        raise NotExact("attention with a mask or weights for each row; key_padding_mask may have rows.")
    if call.get("dropout_p", 0.0) and call.get("training", True):
        raise NotExact(
            "dropout inside nn.MultiheadAttention; make it with dropout=0.0 and put an nn.Dropout behind it."
        )
    axis, fresh = axis_and_freshness([*known, of_padding], call.name)
    result, weights = watch.common(call)()
    return mark(result, Rows(axis, 1, fresh)), None if weights is None else mark(weights, Rows(axis, 0, fresh))
