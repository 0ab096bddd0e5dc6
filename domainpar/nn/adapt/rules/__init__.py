"""The rules of torch calls on rows that are dealt over ranks; importing this package registers them."""

from domainpar.nn.adapt.rules import (  # noqa: F401
    elementwise,
    matrix_products,
    mixtures,
    new_tensors,
    reductions,
    refusals,
    scatters,
    selections,
    shapes,
)
