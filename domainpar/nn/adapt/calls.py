"""Torch calls as rules see them: one name for each function, and each argument by name, wherever it was given."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.nested import rebuilt, tensors_in
from domainpar.nn.adapt.rows import Axis, NotExact, Rows


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


class Argument(NamedTuple):
    """An argument of torch functions.

    Attributes:
        position: Its place among the positional arguments.
        names: All names that it has as a keyword.
        takes_all: Whether all positional arguments that follow may be its values, as in `x.view(2, 3)`.
    """

    position: int
    names: tuple[str, ...]
    takes_all: bool


class Signature:
    """The arguments of a torch call, function or method, for its rule: `input dim index src|source|value`.

    Names that mean the same in torch are separated by `|`, the first is the one that rules use; numpy's are known for
    all calls. `size*` takes all positional arguments that follow.
    """

    def __init__(self, text: str) -> None:
        self._arguments: dict[str, Argument] = {}
        for position, word in enumerate(text.split()):
            names = tuple(word.rstrip("*").split("|"))
            names += tuple(other for name in names for other in _SYNONYMS.get(name, ()))
            self._arguments[names[0]] = Argument(position, names, word.endswith("*"))

    def find(self, name: str) -> Argument:
        """An argument by its name in rules; one that is not in the signature is a keyword only."""
        return self._arguments.get(name) or Argument(sys.maxsize, (name,), False)

    @property
    def first(self) -> Collection[str]:
        """The names of the first argument."""
        return next(iter(self._arguments.values())).names


@dataclass
class Call:
    """One call of a torch function under a rule.

    Attributes:
        func: The function.
        name: Its name without underscores at the ends; `add` for `add`, `add_` and `__add__`.
        args: Its positional arguments; under a rule the first of all is among them.
        kwargs: Its other arguments.
        in_place: Whether it changes its first argument.
        signature: What its arguments are called.
    """

    func: Callable[..., Any]
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    in_place: bool
    signature: Signature

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, wherever and under whatever name it was given; a list of one that takes all that follow."""
        argument = self.signature.find(name)
        if argument.position < len(self.args):
            value, rest = self.args[argument.position], self.args[argument.position :]
        elif (keyword := self._keyword(argument)) is not None:
            value, rest = self.kwargs[keyword], [self.kwargs[keyword]]
        else:
            return default
        if not argument.takes_all:
            return value
        return list(value) if isinstance(value, (tuple, list)) else list(rest)

    def but(self, **values: Any) -> Call:
        """The same call with other arguments, each where it was given."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in values.items():
            argument = self.signature.find(name)
            place = argument.position
            if place >= len(args):
                kwargs[self._keyword(argument) or name] = value
            elif argument.takes_all and not isinstance(args[place], (tuple, list)):
                args[place:] = [value]
            else:
                args[place] = value
        return replace(self, args=args, kwargs=kwargs)

    def with_first(self) -> Call:
        """The call with the first argument in its place; all others stay where and under the name they were given."""
        # Functions written in Python tell which argument is their first.
        python = not self.args and inspect.isfunction(self.func)
        names = tuple(inspect.signature(self.func).parameters)[:1] if python else self.signature.first
        keyword = None if self.args else next((name for name in names if name in self.kwargs), None)
        if keyword is None:
            return self
        others = {name: value for name, value in self.kwargs.items() if name != keyword}
        return replace(self, args=[self.kwargs[keyword]], kwargs=others)

    def mapped(self, change: Callable[[Tensor], Tensor], start: int = 0) -> Call:
        """The same call with its tensors changed, from some positional argument on."""
        args, kwargs = rebuilt(
            (self.args[start:], self.kwargs), lambda value: change(value) if isinstance(value, Tensor) else value
        )
        return replace(self, args=self.args[:start] + args, kwargs=kwargs)

    def _keyword(self, argument: Argument) -> str | None:
        return next((name for name in argument.names if name in self.kwargs), None)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return tensors_in((self.args, self.kwargs))

    @property
    def drops(self) -> bool:
        """Whether a dropout is one: torch's own calls `train` what `torch.nn.functional` calls `training`."""
        training = self.args[2] if len(self.args) > 2 else self.kwargs.get("training", self.kwargs.get("train", True))
        return bool(training)

    def __call__(self) -> Any:
        return self.func(*self.args, **self.kwargs)


# As numpy calls them; torch takes both.
_SYNONYMS = {"dim": ("axis",), "keepdim": ("keepdims",), "other": ("x2",), "input": ("self", "x", "x1", "a")}
# Names of the first argument, where a rule has no signature: torch's own functions tell none.
USUAL = Signature("condition|input|A|tensors")


# Asked of any tensor without a rule: the answers tell nothing of values, and are the same for rows and what is whole.
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
# A number of rows among their arguments makes a tensor of such rows.
TAKES_SIZES = frozenset(
    words(
        "zeros ones empty full new_zeros new_ones new_empty new_full arange rand randn randint randperm expand "
        "broadcast_to repeat tile repeat_interleave bincount"
    )
)
# Random numbers, which every rank would draw otherwise; dropouts are apart, as they draw in training only.
DRAWS = frozenset(
    words(
        "rand randn rand_like randn_like randint randint_like randperm bernoulli normal uniform multinomial "
        "exponential poisson rrelu cauchy geometric log_normal random gumbel_softmax"
    )
)
DROPS = frozenset(
    words("dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout")
)


@cache
def name_of(func: Any) -> tuple[str, bool]:
    """The name a torch function goes by in the rules, and whether it changes its first argument."""
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


ASKED_BY_PYTHON = frozenset(words("bool int float complex index len contains array"))
IN_PLACE_OPERATORS = frozenset(words("add sub mul div truediv floordiv mod pow and or xor lshift rshift matmul"))


def one_axis(axes: Iterable[Axis], what: str) -> Axis:
    """The axis that all of these are, `what` being the call that wants it.

    Raises:
        NotExact: If they are several.
    """
    different = list({id(axis): axis for axis in axes}.values())
    if len(different) != 1:
        names = " and ".join(sorted(axis.name for axis in different))
        raise NotExact(f"torch.{what} puts rows side by side that are not the same rows: {names}.")
    return different[0]


def axis_and_freshness(several: Iterable[Rows | None], what: str) -> tuple[Axis, bool]:
    """The axis of several tensors of the same rows, constants left out, and whether the ghosts of all are up to date.

    Raises:
        NotExact: If they are not the same rows.
    """
    dealt = [rows for rows in several if rows is not None]
    return one_axis((rows.axis for rows in dealt), what), all(rows.fresh for rows in dealt)
