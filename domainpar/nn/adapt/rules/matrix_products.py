"""Matrix products: of each row with weights, of rows with each other, and products that sum over rows."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from domainpar.nn.adapt.across import summed
from domainpar.nn.adapt.calls import Call, axis_and_freshness, words
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.rows import NotExact, Rows, mark
from domainpar.nn.adapt.rules.elementwise import find_place, without_rows
from domainpar.nn.adapt.watch import Watch, rule


def product(watch: Watch, call: Call, operands: Sequence[Tensor], letters: Sequence[str], output: str) -> Tensor:
    """A product that Einstein's notation can say, however torch computes it: the letter of the rows decides.

    Rows whose letter is in the result stay rows. Else the product sums over them: each rank over the rows that it
    counts, then over ranks.

    Args:
        call: Computes it, from the tensors among its arguments.
        operands: Its factors.
        letters: A letter for each dimension of each factor.
        output: A letter for each dimension of the result.
    """
    rows_of_each = [watch.rows(operand) for operand in operands]
    axis, fresh = axis_and_freshness(rows_of_each, call.name)
    letters_of_rows = {word[rows.dim] for word, rows in zip(letters, rows_of_each) if rows}
    row, is_summed = min(letters_of_rows), not letters_of_rows <= set(output)
    broadcasts = call.name == "einsum" or not is_summed  # lengths of 1
    has_constant = any(
        rows is None and row in word and not (broadcasts and operand.size(word.index(row)) == 1)
        for word, operand, rows in zip(letters, operands, rows_of_each)
    )
    if is_summed and (has_constant or len(letters_of_rows) > 1):
        raise NotExact(f"torch.{call.name} sums over rows and something else that is not the same rows.")
    if len(letters_of_rows) > 1:
        raise NotExact(f"torch.{call.name} multiplies every one of the {axis.name} with every other one.")
    if any(word.count(row) > 1 for word in letters):
        raise NotExact(f"torch.{call.name} takes the diagonal of rows by rows.")
    if has_constant:
        raise NotExact(f"torch.{call.name} puts a tensor that is the same on every rank beside rows.")
    if is_summed:
        return mark(summed(call.mapped(watch.counted)(), watch.part), None)
    return mark(watch.common(call)(), Rows(axis, output.index(row), fresh))


@rule("linear", takes="input weight")
@rule("bilinear", takes="input1 input2 weight")
def linear(watch: Watch, call: Call) -> Any:
    """Each row times weights that every rank has."""
    inputs = call.args[: 2 if call.name == "bilinear" else 1]
    if any(watch.rows(weight) is not None for weight in tensors_in((call.args[len(inputs) :], call.kwargs))):
        raise NotExact(f"torch.{call.name} has weights that are divided among the ranks; write it as a matmul.")
    batch = string.ascii_uppercase[: inputs[0].dim() - 1]
    words_of_inputs = [batch + letter for letter, _ in zip("ij", inputs)]
    letters = [*words_of_inputs, "o" + "ij"[: len(inputs)]]
    return product(watch, call, [*inputs, call.get("weight")], letters, batch + "o")


@rule("matmul", "rmatmul", "mm", "bmm", "dot", "mv", takes="input other|mat2|vec|tensor")
def matmul(watch: Watch, call: Call) -> Any:
    """Products in which rows are a batch or the outer dimension; or are summed over, over all ranks."""
    left, right = call.get("input"), call.get("other")
    if call.name == "rmatmul":
        left, right = right, left
        call = replace(call, func=Tensor.matmul, name="matmul", args=[left, right])
    # Dimensions of batches are broadcast, so their letters are counted from behind.
    batches = [string.ascii_uppercase[28 - max(tensor.dim(), 2) :] for tensor in (left, right)]
    of_left, of_right = "i" * (left.dim() > 1), "k" * (right.dim() > 1)
    letters = [batches[0] + of_left + "j", batches[1] + "j" + of_right]
    return product(watch, call, [left, right], letters, max(batches, key=len) + of_left + of_right)


@rule("einsum")
def einsum(watch: Watch, call: Call) -> Any:
    """Products in Einstein's notation."""
    equation, operands = call.args[0], call.args[1:]
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:  # what stands for other dimensions, then what occurs once, as torch sorts it
        alone = sorted(letter for letter in set(inputs) - set(",.") if inputs.count(letter) == 1)
        output = "..." * ("..." in inputs) + "".join(alone)
    # The dimensions that dots stand for are broadcast: spare letters, counted from behind.
    hidden = [operand.dim() - len(word) + 3 for word, operand in zip(inputs.split(","), operands)]
    most = max((count for word, count in zip(inputs.split(","), hidden) if "..." in word), default=0)
    spare = "".join(letter for letter in string.ascii_letters if letter not in equation)[:most]
    letters = [word.replace("...", spare[most - count :]) for word, count in zip(inputs.split(","), hidden)]
    output = output.replace("...", spare)
    call = replace(call, args=[f"{','.join(letters)}->{output}", *operands])
    return product(watch, call, operands, letters, output)


@rule("addmm", "baddbmm", "addmv", "addbmm", takes="input left|mat1|mat|batch1 right|mat2|vec|batch2")
def add_and_multiply(watch: Watch, call: Call) -> Any:
    """`beta * added + alpha * left @ right`."""
    if call.in_place or call.name == "addbmm":
        raise NotExact(f"torch.{call.name} of rows; write it as a sum and a product.")
    added, left, right = map(call.get, ("input", "left", "right"))
    with watch.in_other_words():
        return added * call.kwargs.get("beta", 1) + (left @ right) * call.kwargs.get("alpha", 1)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent(watch: Watch, call: Call) -> Any:
    """A recurrent network along a dimension of features, a sequence for each row; or one step of it."""
    given, states = call.args[0], call.args[1]
    is_step = call.name.endswith("_cell")
    if not is_step:
        if isinstance(states, Tensor) and call.name != "gru" and states.dim() == 1:
            raise NotExact(f"torch.{call.name} of packed sequences.")
        batch_first, dropout, training = call.args[-1], call.args[5], call.args[6]
        if dropout and training:
            raise NotExact(f"dropout inside torch.{call.name}; put an nn.Dropout behind it.")
    states = [states] if isinstance(states, Tensor) else list(states)
    rows_of_each = [watch.rows(tensor) for tensor in (given, *states)]
    # Of a sequence, states are [layers, batch, features]; results lie as input and states do.
    dims = [0 if is_step or batch_first else 1, *[0 if is_step else 1] * len(states)]
    if any(rows is None or rows.dim != dim for rows, dim in zip(rows_of_each, dims)) or given.dim() != 3 - is_step:
        raise NotExact(
            f"torch.{call.name} runs along the rows, whose order is the whole graph's, not one rank's; or it joins "
            "rows with states or inputs that are the same on every rank."
        )
    axis, fresh = axis_and_freshness(rows_of_each, call.name)
    result = watch.common(call)()
    for tensor, dim in zip(tensors_in(result), dims):
        mark(tensor, Rows(axis, dim, fresh))
    return result


_CONVOLUTIONS = words("conv1d conv2d conv3d")
_POOLS = words("max_pool avg_pool adaptive_max_pool adaptive_avg_pool")


@rule(*_CONVOLUTIONS, takes="input weight bias stride padding")
@rule(*(f"{kind}{count}d" for kind in ("conv_transpose", *_POOLS) for count in (1, 2, 3)), takes="input")
def convolution(watch: Watch, call: Call) -> Any:
    """A batch entry for each row; or rows along a dimension of the picture, where the kernel stays within one row."""
    given, count = call.get("input"), int(call.name[-2])
    rows = watch.rows(given)
    if rows is None or any(watch.rows(weight) is not None for weight in tensors_in((call.args[1:], call.kwargs))):
        raise NotExact(f"torch.{call.name} has weights that are divided among the ranks.")
    first = given.dim() - count  # of the dimensions that the kernel runs along
    mixes_channels = "conv" in call.name and rows.dim == first - 1
    stays = rows.dim < first or (call.name in _CONVOLUTIONS and _stays(call, rows.dim - first))
    if mixes_channels or not stays:
        raise NotExact(
            f"torch.{call.name} runs along the rows; their order is the whole graph's, not one rank's. Rows may be the "
            "batch, or lie along a dimension where a convolution has a kernel of length 1, stride 1 and padding 0."
        )
    return mark(without_rows(watch, call, rows.dim), rows.but())


def _stays(call: Call, along: int) -> bool:
    """Whether a convolution makes each entry along one of its dimensions of that entry only."""

    def of(value: Any) -> Any:  # one number is for all dimensions
        return value[min(along, len(value) - 1)] if isinstance(value, (tuple, list)) else value

    kernel, padding = call.get("weight").size(2 + along), of(call.get("padding", 0))
    return bool(kernel == of(call.get("stride", 1)) == 1 and padding in (0, "same", "valid"))


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
    inputs, padding = [call.get(name) for name in ("query", "key", "value")], call.get("key_padding_mask")
    rows_of_inputs = [watch.rows(tensor) for tensor in inputs]
    if any(rows and (tensor.dim() < 3 or rows.dim != 1) for rows, tensor in zip(rows_of_inputs, inputs)):
        raise NotExact(BETWEEN_ROWS)
    of_padding = None if padding is None else watch.rows(padding)
    alike = padding is None or (of_padding is not None and of_padding.dim == 0)
    if None in rows_of_inputs or not alike:
        raise NotExact("attention of rows to what is the same on every rank; expand that to the rows: x.size(0).")
    others = [tensor for tensor in call.tensors if all(tensor is not each for each in (*inputs, padding))]
    mask = call.get("attn_mask")
    # A mask of three dimensions is for each row and head, which torch counts as one.
    if any(watch.rows(tensor) is not None for tensor in others) or (mask is not None and mask.dim() > 2):
        raise NotExact("attention with a mask or weights for each row; key_padding_mask may have rows.")
    if call.get("dropout_p", 0.0) and call.get("training", True):
        raise NotExact(
            "dropout inside nn.MultiheadAttention; make it with dropout=0.0 and put an nn.Dropout behind it."
        )
    axis, fresh = axis_and_freshness([*rows_of_inputs, of_padding], call.name)
    result, weights = watch.common(call)()
    return mark(result, Rows(axis, 1, fresh)), None if weights is None else mark(weights, Rows(axis, 0, fresh))
