"""Flags for a tiny event that is prepared once, and the JSON lines a benchmark leaves."""

import json


def flags(tmp_path_factory, tmp_path):
    return ["--cache", str(tmp_path_factory.getbasetemp() / "events"), "--results", str(tmp_path / "lines.jsonl")]


def lines(tmp_path):
    """Those of measurements, and the tables."""
    found = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    return [line for line in found if "table" not in line], [line["table"] for line in found if "table" in line]
