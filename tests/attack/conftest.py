"""The way to the small parts that the unit tests play with, and to the environments that misbehave."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]
