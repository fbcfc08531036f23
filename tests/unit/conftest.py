"""The way to `joint.py` and `attack/environments.py`."""

import sys
from pathlib import Path

# The mode "importlib" adds no test folder to the path.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "attack")]
# For children only: importing the first two patches Triton, and the third needs tau2-bench.
collect_ignore = ["flash_on_cpu.py", "flash_worker.py", "tau2_real.py"]
