"""Conditions of an acorn configuration as text that our own flags take: our names, pt in GeV.

`weighting`, `hard_cuts` and `target_tracks` share one grammar (`events.targets`), in which acorn counts pt in MeV.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from domainpar.config.errors import ConfigError

# Names in files and with `variable_with_prefix`; what has the same name here is not listed.
_OUR_NAME = {
    "edge_y": "y",
    "eta_particle": "eta",
    "track_particle_eta": "eta",
    "track_particle_id": "particle_id",
    **{f"track_particle_{name}": name for name in ("pt", "nhits", "radius", "primary", "pdgId")},
    "track_redundant_split_edges": "redundant_split_edges",
}


def conditions_text(key: str, conditions: Any) -> str:
    """Conditions as the text of a flag.

    Raises:
        ConfigError: If they are no mapping, or pt may be in MeV or in GeV.
    """
    return _flow(_in_our_words(key, conditions)).removeprefix("{").removesuffix("}")


def at_least_text(key: str, conditions: Any) -> str:
    """The same of `target_tracks`, where a plain number means at least so much.

    Raises:
        ConfigError: If they are no mapping, or pt may be in MeV or in GeV.
    """
    found = _in_our_words(key, conditions)
    least = {
        name: [of, float("inf")] if isinstance(of, int | float) and not isinstance(of, bool) else of
        for name, of in found.items()
    }
    return _flow(least).removeprefix("{").removesuffix("}")


def weighting_text(key: str, rules: Any) -> str:
    """A `weighting` list as the text of `--weighting`.

    Raises:
        ConfigError: If it is no list of rules, a rule asks for what stores do not keep, or pt may be in MeV or in GeV.
    """
    return _flow([_weight_and_conditions(key, rule) for rule in _rules(key, rules)])


def target_of_weighting(key: str, rules: Any) -> str | None:
    """The target that a `weighting` list describes: acorn counts true edges of positive weight as found or missed.

    Returns:
        The conditions of the only rule that gives weight to true edges, as the text of `--target`; None if there are
        several, or later ones take it from some again, or it gives it to all of them.
    """
    on_true = [
        rule for rule in (_weight_and_conditions(key, rule) for rule in _rules(key, rules)) if _may_be_true(rule)
    ]
    if [rule["weight"] > 0 for rule in on_true] != [False] * (len(on_true) - 1) + [True]:
        return None
    on_particle = {name: of for name, of in on_true[-1]["conditions"].items() if name != "y"}
    return _flow(on_particle).removeprefix("{").removesuffix("}") if on_particle else None


def _may_be_true(rule: Mapping[str, Any]) -> bool:
    return rule["conditions"].get("y", True) not in (False, 0)


def _rules(key: str, rules: Any) -> list[Any]:
    if not isinstance(rules, list) or not all(isinstance(rule, dict) and "weight" in rule for rule in rules):
        raise ConfigError(f"{key} is {rules!r}, not a list of weights and conditions", "write it as acorn does")
    return rules


def _weight_and_conditions(key: str, rule: Mapping[str, Any]) -> dict[str, Any]:
    conditions = _in_our_words(key, rule.get("conditions"))
    if "redundant_split_edges" in conditions:
        raise ConfigError(
            f"{key} has a condition on redundant_split_edges, which stores do not keep",
            "remove the line: such edges then have the weight of their particle's others",
        )
    return {"weight": rule["weight"], "conditions": conditions}


def _in_our_words(key: str, conditions: Any) -> dict[str, Any]:
    if not isinstance(conditions, dict) or not conditions:
        raise ConfigError(
            f"{key} has conditions {conditions!r}, not a mapping from quantities", "write 'pt: [1000, .inf]'"
        )
    found: dict[str, Any] = {str(_OUR_NAME.get(name, name)): of for name, of in conditions.items()}
    if "pt" in found:
        found["pt"] = _scaled(found["pt"], _gev(key, found["pt"]))
    return found


def _gev(key: str, condition: Any) -> float:
    """What makes GeV of a condition on pt, by its size: above 50 only MeV make sense, below 20 only GeV."""
    numbers = [abs(n) for n in _numbers(condition) if n not in (0, float("inf"), float("-inf"))]
    if all(number >= 50 for number in numbers):
        return 1e-3
    if all(number <= 20 for number in numbers):
        return 1.0
    raise ConfigError(f"{key} has pt: {condition!r}; is that MeV or GeV?", "write it in MeV, as acorn does")


def _numbers(condition: Any) -> Iterable[float]:
    if isinstance(condition, list):
        for part in condition:
            yield from _numbers(part)
    elif isinstance(condition, int | float):
        yield condition


def _scaled(condition: Any, factor: float) -> Any:
    if isinstance(condition, list):
        return [_scaled(part, factor) for part in condition]
    return condition * factor if isinstance(condition, int | float) else condition


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).strip()
