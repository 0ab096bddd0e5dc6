"""Values of flags that are one piece of text and mean more: conditions, weights, names, numbers, layer pairs."""

import math
import re
from functools import cached_property
from itertools import pairwise
from typing import Any

from domainpar.tracking.config.group import ConfigError, Text

LayerPair = tuple[tuple[int, int], tuple[int, int]]
WeightRules = list[tuple[float, dict[str, Any]]]


def _of_yaml(text: str, hint: str) -> Any:
    """The value of a text that is YAML.

    Raises:
        ConfigError: If it is not.
    """
    import yaml  # only where a flag is given that is YAML: it takes as long as all flags of a command

    from domainpar.tracking.config.yaml_text import loaded_yaml

    try:
        return loaded_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {str(error).splitlines()[0]}", hint) from error


def _numbers(text: str) -> list[float]:
    """Numbers with commas between them; what is none is NaN."""
    numbers = []
    for part in text.split(","):
        try:
            numbers.append(float(part))
        except ValueError:
            numbers.append(math.nan)
    return numbers


# Of the quantities a condition can be about, those that are real numbers.
_REAL = ("pt", "eta", "eta_particle", "radius", "vz")


def _check_conditions(conditions: Any, hint: str, which: str = "") -> dict[str, Any]:
    """Refuse what is no mapping, and `pt: 1`, which asks for a pT of 1 exactly: no particle has it, nobody means it."""
    if not isinstance(conditions, dict) or not conditions or None in conditions.values():
        raise ConfigError(f"{which}not a mapping from quantities to conditions", hint)
    for quantity, condition in conditions.items():
        if quantity in _REAL and isinstance(condition, int | float):
            raise ConfigError(
                f"{which}asks for {quantity} equal to {condition}, and hardly a particle has exactly that",
                f"for {condition} and more write '{quantity}: [{condition}, .inf]', for equal '[is, {condition}]'",
            )
    return conditions


class Conditions(Text):
    """Conditions on particles: a YAML mapping from a quantity to its condition, braces optional."""

    @cached_property
    def value(self) -> dict[str, Any]:
        hint = "write it as 'pt: [1, .inf], nhits: [3, .inf]'"
        # Without braces `pt: [1, .inf], nhits: 3` would not be YAML.
        return _check_conditions(_of_yaml(self if self.lstrip().startswith("{") else "{" + self + "}", hint), hint)


class ConditionsOrAll(Conditions):
    """Conditions on particles; no text: all of them."""

    @cached_property
    def value(self) -> dict[str, Any]:
        return super().value if self else {}


class LossWeights(Text):
    """Names of labels and the weights of their losses, above 0: `pt:0.1, origin:0.5`."""

    @cached_property
    def value(self) -> dict[str, float]:
        weights: dict[str, float] = {}
        for pair in self.split(","):
            name, _, number = (word.strip() for word in pair.rpartition(":"))
            (weight,) = _numbers(number)
            if not name or not 0 < weight < math.inf or name in weights:
                hint = "write it as 'pt:0.1', or several: 'pt:0.1, origin:0.5'"
                raise ConfigError(f"{pair.strip()!r} is no label named once, with a weight above 0", hint)
            weights[name] = weight
        return weights


class Weighting(Text):
    """Weights by rules: a YAML list of a weight and conditions each."""

    @cached_property
    def value(self) -> WeightRules:
        hint = "write it as '[{weight: 2, conditions: {y: true, pt: [1, .inf]}}]'"
        rules = _of_yaml(self, hint)
        if not isinstance(rules, list) or not rules:
            raise ConfigError("not a list of rules", hint)
        for rule in rules:
            if not isinstance(rule, dict) or set(rule) != {"weight", "conditions"}:
                raise ConfigError(f"a rule is {rule!r}, not one weight and its conditions", hint)
            weight = rule["weight"]
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ConfigError(f"a weight is {weight!r}, not a finite number", hint)
            _check_conditions(rule["conditions"], hint, f"conditions {rule['conditions']!r}: ")
        return [(float(rule["weight"]), rule["conditions"]) for rule in rules]


class NameList(Text):
    """Names, `r, phi, z`; `none` and nothing are no names."""

    @cached_property
    def value(self) -> tuple[str, ...]:
        return () if self.strip() in ("", "none") else tuple(name.strip() for name in self.split(","))


class Numbers(Text):
    """Finite numbers other than 0: `1000, 3.14, 1000`."""

    @cached_property
    def value(self) -> tuple[float, ...]:
        for part, number in zip(self.split(","), _numbers(self)):
            if not math.isfinite(number) or number == 0:
                raise ConfigError(f"{part.strip()!r} is no number other than 0", "write numbers: '1000, 3.14, 1000'")
        return tuple(_numbers(self))


class Spot(Text):
    """The beam spot along the beam, its middle and its width above 0, in mm, `0, 55`; or its least and most width."""

    @cached_property
    def value(self) -> tuple[float, ...]:
        match _numbers(self):
            case z, *widths if math.isfinite(z) and 0 < len(widths) < 3 and _ascend(0, *widths) and widths[0] > 0:
                return z, *widths
        raise ConfigError("not two numbers, the second above 0", "write its z and its width (sigma) in mm: '0, 55'")


class BeamLine(Text):
    """Where the beam passes x and y, in mm: `-0.5, 0.3`."""

    @cached_property
    def value(self) -> tuple[float, float]:
        match _numbers(self):
            case x, y if math.isfinite(x) and math.isfinite(y):
                return x, y
        raise ConfigError("not two numbers", "write x and y of the beam in mm: '-0.5, 0.3'")


class FromTo(Text):
    """A number from 0 on, or the least and the most of one: `200`, `60, 200`."""

    @cached_property
    def value(self) -> tuple[float, float]:
        numbers = _numbers(self)
        if len(numbers) > 2 or not _ascend(0, *numbers):
            raise ConfigError("not a number from 0 on, or two, the smaller one first", "write it as 200, or '60, 200'")
        return numbers[0], numbers[-1]


def _ascend(*numbers: float) -> bool:
    return all(low <= high < math.inf for low, high in pairwise(numbers))


_SKIPPED = {"skip-one": 1, "skip-two": 2}


class LayerPairs(Text):
    """Pairs of layers, ((volume, layer), (volume, layer)) of the inner and the outer end: `8.2-8.4, 8.4-8.6`.

    `skip-one` and `skip-two` stand for the pairs of TrackML's layers with as many layers between them at most.
    """

    @cached_property
    def value(self) -> tuple[LayerPair, ...]:
        if self in _SKIPPED:
            from domainpar.tracking.events.detector import crossed_in_turn  # numpy comes with it; --help needs none

            return crossed_in_turn(_SKIPPED[self])
        pairs: list[LayerPair] = []
        for pair in self.split(","):
            match = re.fullmatch(r"\s*(\d+)\.(\d+)\s*-\s*(\d+)\.(\d+)\s*", pair)
            if match is None:
                hint = "write VOLUME.LAYER-VOLUME.LAYER: '8.2-8.4, 8.4-8.6'"
                raise ConfigError(f"{pair.strip()!r} is no pair of layers", hint)
            inner_volume, inner_layer, outer_volume, outer_layer = (int(number) for number in match.groups())
            pairs.append(((inner_volume, inner_layer), (outer_volume, outer_layer)))
        return tuple(pairs)
