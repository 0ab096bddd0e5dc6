"""Rules of torch calls on rows that are divided among ranks. Importing this package registers them."""

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
