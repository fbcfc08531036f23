"""Puts the dense reference within reach of the tests here (importlib mode adds no test folder to the path)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
