"""Benchmarks import each other by name, as `python bench/NAME.py` lets them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
sys.path.append(str(Path(__file__).parents[1] / "nn"))  # networks and operations to compare with
