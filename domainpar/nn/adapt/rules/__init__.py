"""The rules of torch calls on rows that are dealt over ranks; importing this package registers them."""

from domainpar.nn.adapt.rules import (
    dropping,
    elementwise,
    making,
    matrix_products,
    mixing,
    normalising,
    reading,
    reducing,
    reshaping,
    selecting,
    summing,
    synonyms,
)

__all__ = [
    "dropping",
    "elementwise",
    "making",
    "matrix_products",
    "mixing",
    "normalising",
    "reading",
    "reducing",
    "reshaping",
    "selecting",
    "summing",
    "synonyms",
]
