"""vLLM's server. Each of its processes ends with the one that started it, even after kill -9.

vLLM's engine does not notice that its API server is gone. The engine is started by spawn, which
imports this module again.
"""

import ctypes
import runpy
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG, see prctl(2)."""

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
