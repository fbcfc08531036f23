"""What rollouts that run ahead of training save: the same updates with rollout.ahead = 0 and 1, over one vLLM server.

    python bench/ahead.py [--updates 8] [--repeats 3] [overrides of `paw train quickstart`]

Trainer and server have a core each. The server is started once; runs take turns. Writes bench/results/ahead_cpu.csv,
the median seconds of each run's updates and of their phases (but the first two, when the pipeline fills), and prints
the ratio of the medians.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.common import RESULTS, paw, write
from bench.kernels import cpu_name
from paw.recipe import load
from paw.rollout.engines.servers import Servers, vllm_command

FILL = 2
PHASES = ("rollout", "score", "update", "sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options, overrides = parser.parse_known_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    model = Path(paw("warmup", "quickstart").splitlines()[-1])
    limits, rows = load("quickstart").rollout, []
    context = limits.max_prompt_tokens + limits.max_response_tokens
    with tempfile.TemporaryDirectory() as name:
        servers = Servers(vllm_command(model, max_model_len=context, dtype="float32", on_cpu=True), [[]], Path(name))
        try:
            servers.wait()
            common = ("--model.path", model, "--run.dir", name, "--run.threads", 1, "--run.updates", options.updates)
            common += ("--engine.type", "server", "--engine.urls", json.dumps(servers.urls))
            common += ("--eval.every", 0, "--eval.games", 1, *overrides)
            for run in range(2 * options.repeats):
                ahead = run % 2
                paw("train", "quickstart", *common, "--rollout.ahead", ahead, "--run.name", f"run-{run}")
                text = (Path(name) / f"run-{run}" / "metrics.jsonl").read_text(encoding="utf-8")
                lines = [json.loads(line) for line in text.splitlines()][1 + FILL :]
                seconds = {phase: median(line[f"time/{phase}"] for line in lines) for phase in PHASES}
                row = {"ahead": ahead, "repeat": run // 2, "seconds": sum(seconds.values())} | seconds
                row = {key: round(value, 3) for key, value in row.items()}
                rows.append(row | {"cpu": cpu_name(), "torch": torch.__version__})
                print(*(f"{key} {value:g}" for key, value in row.items()), flush=True)
        finally:
            servers.close()
    write(RESULTS / "ahead_cpu.csv", rows)
    zero, one = (median(row["seconds"] for row in rows if row["ahead"] == ahead) for ahead in (0, 1))
    print(f"an update takes {zero:.2f} s with ahead = 0 and {one:.2f} s with 1: {zero / one:.2f} times the speed")


if __name__ == "__main__":
    main()
