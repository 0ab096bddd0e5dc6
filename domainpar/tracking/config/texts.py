"""Values of flags that are one piece of text and mean more: conditions, weights, names, numbers, layer pairs."""

import math
import re
from functools import partial
from typing import Any

import yaml

from domainpar.tracking.config.group import WHOLE, ConfigError

LayerPair = tuple[tuple[int, int], tuple[int, int]]
WeightRules = list[tuple[float, dict[str, Any]]]


def loaded_yaml(text: str) -> Any:
    """The plain values of a YAML text.

    Raises:
        ConfigError: If a key is given twice in one mapping: YAML itself lets the last one win in silence. If the end of
            a run's configuration is missing.
        yaml.YAMLError: If it is not YAML.
    """
    if text.startswith(WHOLE) and not text.rstrip().endswith("\n..."):
        raise ConfigError("its end is missing: the file is half of what was written", "copy it anew")
    loader = _EachKeyOnce(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()  # its parts refer to each other


class _EachKeyOnce(yaml.SafeLoader):
    """Plain values only, like yaml's own safe loader, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if (key.tag, key.value) in lines:
                    first = lines[key.tag, key.value]
                    where = f", in lines {first} and {line}" if first != line else ""
                    raise ConfigError(f"{key.value} is given twice{where}", "keep one of the two")
                lines[key.tag, key.value] = line
        return super().construct_mapping(node, deep)


def conditions_of(name: str, text: str) -> dict[str, Any]:
    """Read the conditions that a flag of this name gives: a YAML mapping from a particle's quantity, braces optional.

    Raises:
        ConfigError: If the text is no mapping from quantities to conditions.
    """
    hint = f"write it as {name} 'pt: [1, .inf], nhits: [3, .inf]'"
    # Without braces, `pt: [1, .inf], nhits: 3` would not be YAML of one line.
    in_braces = text if text.lstrip().startswith("{") else "{" + text + "}"
    conditions = _value_of_flag(name, text, in_braces, hint)
    _check_conditions(name, repr(text), conditions, hint)
    return dict(conditions)


target_conditions = partial(conditions_of, "--target")
"""Read the conditions of `--target`."""


def _value_of_flag(name: str, text: str, as_yaml: str, hint: str) -> Any:
    """The value of a flag whose text is YAML, errors naming the flag."""
    try:
        return loaded_yaml(as_yaml)
    except ConfigError as error:
        raise ConfigError(f"{name} {text!r}: {error.what}", error.hint) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} {text!r} is not YAML: {str(error).splitlines()[0]}", hint) from error


# Of the quantities a condition can be about, those that are real numbers.
_REAL = ("pt", "eta", "eta_particle", "radius", "vz")


def _check_conditions(name: str, text: str, conditions: Any, hint: str) -> None:
    """Refuse what is no mapping, and `pt: 1`, which asks for a pT of 1 exactly: no particle has it, nobody means it."""
    if not isinstance(conditions, dict) or not conditions or None in conditions.values():
        raise ConfigError(f"{name} {text} is not a mapping from quantities to conditions", hint)
    for quantity, condition in conditions.items():
        if quantity in _REAL and isinstance(condition, int | float):
            raise ConfigError(
                f"{name} asks for {quantity} equal to {condition}, and hardly a particle has exactly that",
                f"for {condition} and more write '{quantity}: [{condition}, .inf]', for equal '[is, {condition}]'",
            )


def parse_aux(text: str) -> dict[str, float]:
    """Read `--aux`: names of labels and the weights of their losses, `pt:0.1, origin:0.5`.

    Raises:
        ConfigError: If one has no weight above 0, or is there twice.
    """
    weights: dict[str, float] = {}
    for pair in text.split(","):
        name, _, number = (word.strip() for word in pair.rpartition(":"))
        hint = "write it as --aux 'pt:0.1', or several: 'pt:0.1, origin:0.5'"
        try:
            weight = float(number)
        except ValueError as error:
            raise ConfigError(f"--aux {text!r}: {pair.strip()!r} is no label and its weight", hint) from error
        if not name or not 0 < weight < math.inf or name in weights:
            raise ConfigError(f"--aux {text!r}: {pair.strip()!r} is no label named once, with a weight above 0", hint)
        weights[name] = weight
    return weights


def parse_event_size(text: str) -> tuple[int, int]:
    """Read `--event-size`: the fewest and the most hits of an event, `50000, 150000`.

    Raises:
        ConfigError: If it is no such pair.
    """
    try:
        low, high = (int(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--event-size {text!r} is no pair of numbers", "write it as '50000, 150000'") from error
    if not 0 <= low <= high:
        raise ConfigError(f"--event-size {text!r} is an empty range", "the smaller number comes first")
    return low, high


def check_sectors(name: str, sectors: int | str | None) -> None:
    """Refuse what is neither a number of sectors nor a grid of them.

    Raises:
        ConfigError: Naming the flag.
    """
    from partitioners import number_of_sectors  # numpy comes with it: `--help` does not wait for it

    try:
        if sectors is not None:
            number_of_sectors(sectors)
    except ValueError:
        what = f"{name} is {sectors}; it must be at least 1, or a grid"
        hint = f"write a number, or wedges in phi x slices in eta: {name} 8x2"
        raise ConfigError(what, hint) from None


def parse_weighting(text: str) -> WeightRules:
    """Read `--weighting`: a YAML list of a weight and conditions each.

    Raises:
        ConfigError: If the text is no such list.
    """
    hint = "write it as --weighting '[{weight: 2, conditions: {y: true, pt: [1, .inf]}}]'"
    rules = _value_of_flag("--weighting", text, text, hint)
    if not isinstance(rules, list) or not rules:
        raise ConfigError(f"--weighting {text!r} is not a list of rules", hint)
    for rule in rules:
        if not isinstance(rule, dict) or set(rule) != {"weight", "conditions"}:
            raise ConfigError(f"--weighting has a rule {rule!r}, not one weight and its conditions", hint)
        weight, conditions = rule["weight"], rule["conditions"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"--weighting has a weight {weight!r}, not a finite number", hint)
        _check_conditions("--weighting", f"has conditions {conditions!r}, which", conditions, hint)
    return [(float(rule["weight"]), rule["conditions"]) for rule in rules]


def parse_names(text: str) -> tuple[str, ...]:
    """Read a list of names, `r, phi, z`; `none` and nothing are no names."""
    return () if text.strip() in ("", "none") else tuple(name.strip() for name in text.split(","))


def parse_numbers(name: str, text: str) -> tuple[float, ...]:
    """Read the numbers that a flag of this name gives, `1000, 3.14, 1000`.

    Raises:
        ConfigError: If one is not a finite number other than 0.
    """
    numbers = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = math.nan  # refused below, with infinity and 0
        if not math.isfinite(number) or number == 0:
            raise ConfigError(f"{name} has {part.strip()!r}", f"write numbers other than 0: {name} '1000, 3.14, 1000'")
        numbers.append(number)
    return tuple(numbers)


def parse_betas(text: str) -> tuple[float, float]:
    """Read `--betas`.

    Raises:
        ConfigError: If they are not two numbers from 0 up to, but not, 1.
    """
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        first = second = math.nan
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ConfigError(f"--betas is {text!r}", "write two numbers below 1: --betas 0.9,0.999")
    return first, second


def parse_factors(text: str) -> dict[str, float]:
    """Read `--lr-factors`: a YAML mapping from patterns of names to factors of the learning rate, braces optional.

    Raises:
        ConfigError: If a pattern is no regular expression, or a factor no number from 0 on.
    """
    hint = "write it as --lr-factors 'head: 0.1, node_encoder: 2', a pattern with signs of its own in quotes"
    factors = _value_of_flag("--lr-factors", text, text if text.lstrip().startswith("{") else "{" + text + "}", hint)
    if not isinstance(factors, dict) or not factors:
        raise ConfigError(f"--lr-factors {text!r} is not a mapping from names to factors", hint)
    for pattern, factor in factors.items():
        try:
            factors[pattern] = math.nan if isinstance(factor, bool) else float(factor)  # YAML takes 1e-3 for a text
        except (TypeError, ValueError):
            factors[pattern] = math.nan
        if not 0 <= factors[pattern] < math.inf:
            raise ConfigError(f"--lr-factors has {factor!r} for {pattern!r}, not a number from 0 on", hint)
        try:
            re.compile(str(pattern))
        except re.error as error:
            raise ConfigError(f"--lr-factors has {pattern!r}, no regular expression: {error}", hint) from error
    return {str(pattern): factor for pattern, factor in factors.items()}


_SKIPPED = {"skip-one": 1, "skip-two": 2}


def parse_layer_pairs(text: str) -> tuple[LayerPair, ...]:
    """Read `--layer-pairs`: ((volume, layer), (volume, layer)) of the inner and the outer end of each pair.

    `skip-one` and `skip-two` stand for the pairs of TrackML's layers with as many layers between them at most.

    Raises:
        ConfigError: If a pair is not of the form `8.2-8.4`.
    """
    if text in _SKIPPED:
        from domainpar.tracking.events.detector import crossed_in_turn  # numpy comes with it; --help needs none

        return crossed_in_turn(_SKIPPED[text])
    pairs: list[LayerPair] = []
    for pair in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\.(\d+)\s*-\s*(\d+)\.(\d+)\s*", pair)
        if match is None:
            raise ConfigError(
                f"--layer-pairs has {pair.strip()!r}", "write VOLUME.LAYER-VOLUME.LAYER: '8.2-8.4, 8.4-8.6'"
            )
        inner_volume, inner_layer, outer_volume, outer_layer = (int(number) for number in match.groups())
        pairs.append(((inner_volume, inner_layer), (outer_volume, outer_layer)))
    return tuple(pairs)
