"""The YAML of a configuration: as a run keeps it, and as it is read, each key once."""

from typing import Any

import yaml

from domainpar.tracking.config.group import CODE, OWN_CODE, ConfigError, Group, Text, groups, is_code, title

# How a command was started, not what it computes: left out of a run's `config.yaml`.
_NOT_KEPT = ("out", "resume", "overwrite", "report", "verify")

# First line of a run's `config.yaml`: half of one is YAML too, and would stand for defaults.
_WHOLE = "--- # whole if it ends in a line of three dots"


def resolved_yaml(config: Group) -> str:
    """The whole configuration as YAML, defaults included, to be given to `--config` for another run.

    The output directory and `--resume`, `--overwrite`, `--report` are left out: they say how a command was started.
    """
    sections = []
    for group in groups(type(config)):
        kept = {name: getattr(config, name) for name in group.__annotations__ if name not in _NOT_KEPT}
        kept |= {name: str(value) for name, value in kept.items() if isinstance(value, Text)}
        kept |= {name: OWN_CODE for name in CODE if is_code(str(kept.get(name)))}
        sections.append(f"# {title(group)}\n" + yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))
    return f"{_WHOLE}\n" + "\n".join(sections) + "...\n"


def loaded_yaml(text: str) -> Any:
    """The plain values of a YAML text.

    Raises:
        ConfigError: If a key is given twice in one mapping: YAML itself lets the last one win in silence. If the end of
            a run's configuration is missing.
        yaml.YAMLError: If it is not YAML.
    """
    if text.startswith(_WHOLE) and not text.rstrip().endswith("\n..."):
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
