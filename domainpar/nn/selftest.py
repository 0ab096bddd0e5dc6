"""Does this machine's matrix library keep the promise that rule 1 of DESIGN section 3 rests on?

A row of a padded block must not depend on the block's other rows. Some milliseconds on the model's own shapes: it
samples, it does not prove.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from domainpar.nn.mlp import COLUMNS, MLP, ROWS, padded
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.parallel.transport import Transport

SAMPLE_ROWS = 1000  # not a multiple of 32: the last rows sit in a ragged tail
SUBSETS = (1, 7, 33, 500)


def rows_are_independent(model: nn.Module, transport: Transport) -> str | None:
    """Try every distinct perceptron of a model on whole and on partial blocks. *Collective*.

    Returns:
        None if all rows kept their bits, forward and backward, and all ranks got the same ones; else what differed, in
        words, the same on every rank.
    """
    mlps = (module.mlp for module in model.modules() if isinstance(module, NodeStage | EdgeStage))
    distinct = {str([tuple(parameter.shape) for parameter in mlp.parameters()]): mlp for mlp in mlps}
    digest = hashlib.sha256()
    problem = ""
    for mlp in distinct.values():
        rows = _sample(mlp)
        whole = _forward_and_back(mlp, rows)
        digest.update(b"".join(part.cpu().numpy().tobytes() for part in whole))
        problem = problem or _compare_subsets(mlp, rows, whole)
    found = [text.decode() for text in transport.all_gather(f"{digest.hexdigest()} {problem}".encode())]
    problems = sorted({text[65:] for text in found} - {""})
    if problems:
        return problems[0]
    if len(set(found)) > 1:
        return "ranks compute different bits from the same numbers: their machines or matrix libraries differ"
    return None


def _sample(mlp: MLP) -> Tensor:
    parameter = next(mlp.parameters())
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(SAMPLE_ROWS, mlp.in_features, generator=generator, dtype=torch.float64)
    return rows.to(parameter.device, parameter.dtype)


def _forward_and_back(mlp: MLP, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and input gradients of some rows in one block."""
    block = rows.new_zeros(padded(len(rows), ROWS), padded(rows.shape[1], COLUMNS))
    block[: len(rows), : rows.shape[1]] = rows
    block.requires_grad_()
    with torch.enable_grad():
        out = mlp(block)
    (gradient,) = torch.autograd.grad(out, block, torch.tanh(out.detach()))
    return out.detach()[: len(rows)], gradient[: len(rows)]


def _compare_subsets(mlp: MLP, rows: Tensor, whole: tuple[Tensor, Tensor]) -> str:
    generator = torch.Generator().manual_seed(1)
    for size in SUBSETS:
        chosen = torch.randperm(len(rows), generator=generator)[:size].to(rows.device)
        for direction, ours, theirs in zip(("forward", "backward"), _forward_and_back(mlp, rows[chosen]), whole):
            if not torch.equal(ours, theirs[chosen]):
                return (
                    f"rows of a {mlp.in_features}-column block change with the other rows of the block ({direction}, "
                    f"{size} of {len(rows)} rows, {rows.dtype}): this machine's matrix library does not keep rows apart"
                )
    return ""
