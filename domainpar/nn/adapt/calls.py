"""Torch calls as the rules see them: by one name each, with arguments wherever they were given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from domainpar.nn.adapt.rows import Axis, NotExact


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


@dataclass
class Call:
    """One call of a torch function under a rule.

    Attributes:
        func: The function.
        name: Its name without underscores at the ends; `add` for `add`, `add_` and `__add__`.
        args: Its positional arguments.
        kwargs: Its other arguments.
        in_place: Whether it changes its first argument.
    """

    func: Callable[..., Any]
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    in_place: bool

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, wherever it was given."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def drops(self) -> bool:
        """Whether a dropout is one: torch's own calls `train` what `torch.nn.functional` calls `training`."""
        return bool(self.get(2, "training", self.kwargs.get("train", True)))

    def __call__(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def but(self, *args: Any, **kwargs: Any) -> Call:
        """The same call with other arguments."""
        return Call(self.func, self.name, list(args), kwargs, self.in_place)


TELLS_NO_VALUE = frozenset(
    words(
        "dim ndim dtype device is_floating_point is_complex requires_grad is_contiguous layout is_sparse type_ "
        "element_size get_device is_cuda is_leaf _version names is_nested is_quantized is_mkldnn is_meta grad_fn "
        "requires_grad_ retain_grad is_inference is_sparse_csr has_names hash repr is_pinned is_cpu "
        "is_mps is_xpu is_signed is_tensor itemsize result_type can_cast get_default_dtype is_conj is_neg _is_view "
        "_has_compatible_shallow_copy_type is_same_size dense_dim sparse_dim storage_offset set_num_threads "
        "is_vulkan is_ipu is_mtia is_xla is_maia has_torch_function grad output_nr reduce_ex format _base backward"
    )
) | {"set requires_grad", "set _backward_hooks"}
TAKES_SIZES = frozenset(
    words(
        "zeros ones empty full new_zeros new_ones new_empty new_full arange rand randn randint randperm expand "
        "broadcast_to repeat tile repeat_interleave bincount"
    )
)
DRAWS = frozenset(
    words(
        "rand randn rand_like randn_like randint randint_like randperm bernoulli normal uniform multinomial "
        "exponential poisson rrelu cauchy geometric log_normal random gumbel_softmax"
    )
)
DROPS = frozenset(
    words("dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout")
)

_NAMES: dict[Any, tuple[str, bool]] = {}


def name_of(func: Any) -> tuple[str, bool]:
    """The name a torch function goes by in the rules, and whether it changes its first argument."""
    known = _NAMES.get(func)
    if known is None:
        known = _NAMES[func] = _find_name(func)
    return known


def _find_name(func: Any) -> tuple[str, bool]:
    name = getattr(func, "__name__", str(func))
    if (owner := _foreign_owner(func)) is not None:  # what others call softmax need not be torch's
        return f"{owner}.{name}", False
    if name in ("__get__", "__set__", "__delete__"):
        prop = func.__self__.__name__
        return (prop, False) if name == "__get__" else (f"set {prop}", True)
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        if bare == "rand":  # not torch.rand
            return "reflected_and", False
        if bare in ASKED_BY_PYTHON:  # not x.bool(), x.int()
            return f"python {bare}", False
        if bare.startswith("i") and bare[1:] in IN_PLACE_OPERATORS:
            return bare[1:], True
        return bare, bare == "setitem"
    if name in TELLS_NO_VALUE:
        return name, False
    return name.removeprefix("special_").rstrip("_"), name.endswith("_")  # torch.special.expit and its kin


def _foreign_owner(func: Any) -> str | None:
    """The library that a function comes from, if that is not torch itself; `torch.autograd` counts as another one."""
    if (qualified := getattr(func, "_qualified_op_name", None)) is not None:  # of torch.ops, "library::name"
        library: str = qualified.split("::")[0]
        return None if library == "aten" else library
    module = getattr(func, "__module__", None)
    if func is torch.autograd.grad:
        return "autograd"
    return None if not isinstance(module, str) or module.split(".")[0] == "torch" else module


# Of torch's own functions, which tell no signature.
_FIRST = frozenset(words("condition sorted_sequence input self x x1 a A tensors"))
_INPUT_IS_SECOND = frozenset(words("where searchsorted polygamma special_polygamma"))
_TWO_SAMPLES = frozenset(words("cosine_similarity pairwise_distance cdist"))  # x1 and x2 are their own names there
_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}


def usual_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the first in its place, and torch's names where numpy's were given.

    Torch's own functions take both; functions written in Python keep the names that they have.
    """
    if not kwargs:
        return args, kwargs
    if inspect.isfunction(func):
        first = tuple(inspect.signature(func).parameters)[:1]
        return _first_in_place(args, kwargs, first)
    name = getattr(func, "__name__", "")
    if name not in _TWO_SAMPLES and not _NUMPY_NAMES.keys().isdisjoint(kwargs):
        kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
    return _first_in_place(args, kwargs, _FIRST - {"input"} if name in _INPUT_IS_SECOND else _FIRST)


def _first_in_place(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found = [] if args else [name for name in kwargs if name in names]
    if not found:
        return args, kwargs
    return (kwargs[found[0]],), {name: value for name, value in kwargs.items() if name != found[0]}


ASKED_BY_PYTHON = frozenset(words("bool int float complex index len contains array"))
IN_PLACE_OPERATORS = frozenset(words("add sub mul div truediv floordiv mod pow and or xor lshift rshift matmul"))


def one_axis(axes: Iterable[Axis], call: Call) -> Axis:
    """The axis that all of these are.

    Raises:
        NotExact: If they are several.
    """
    found = list({id(axis): axis for axis in axes}.values())
    if len(found) != 1:
        raise NotExact(
            f"torch.{call.name} puts rows side by side that are not the same rows: "
            f"{' and '.join(sorted(axis.name for axis in found))}."
        )
    return found[0]
