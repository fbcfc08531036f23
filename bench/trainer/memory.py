"""The plan's memory against a simulated update, and against the card where one is there.

    python bench/trainer/memory.py                  # simulate every case
    python bench/trainer/memory.py --device cuda    # and run the real step of what fits on this card

Writes bench/results/memory_plan.csv, with a column for the card, and the table of docs/memory.md.
The simulation is memory_simulation.py. All tokens of a row but the first are targets: the most that
the head can have.
"""

import argparse
import platform
import sys
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, write
from bench.trainer.memory_simulation import measured, simulate
from paw.config import Config
from paw.recipe import validate
from paw.tools.plan import GIB, USABLE, Plan
from paw.tools.shapes import SHAPES, Shape

PAGE = ROOT / "docs" / "memory.md"


def predicted(config: Config, shape: Shape, world: int) -> dict[str, float]:
    """The plan's figures for what a simulation sees: no reference, engine or CUDA context."""
    found = Plan(config, shape, gpus=world, gpu_gib=80.0)
    seen = ("weights", "gradients", "optimizer", "activations", "head", "step")
    return {
        phase: sum(found.phases[phase].get(part, 0.0) for part in seen)
        for phase in ("update", "step")
    }


def make_config(model: str, world: int, optimizer: str, checkpointing: str, tokens: int) -> Config:
    """A cell's configuration; flash-adamw alone on a card keeps its state in host memory."""
    optim = {"name": optimizer, "micro_batch_tokens": tokens}
    if optimizer == "flash-adamw":
        optim["offload"] = world == 1
    shape = {"path": model, "dtype": "bfloat16", "checkpointing": checkpointing}
    return validate({"model": shape, "optim": optim}, origin="memory")


CASES = [
    *product(
        ("Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B"),
        (1, 8),
        ("adamw", "flash-adamw"),
        ("full",),
        (8192,),
    ),
    ("Qwen2.5-1.5B", 1, "adamw", "none", 8192),
    ("Qwen2.5-1.5B", 1, "flash-adamw", "selective", 8192),
    ("Qwen2.5-14B", 1, "flash-adamw", "full", 16384),
    ("Qwen3-4B", 1, "flash-adamw", "full", 8192),
    ("Llama-3.2-3B", 2, "adamw", "selective", 8192),
]
"""(model, GPUs, optimizer, checkpointing, tokens of a micro-batch)."""


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of docs/memory.md."""
    lines = [
        "| model | GPUs | optimizer | checkpointing | tokens | plan, GiB | simulated | plan / simulated | on a GPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = row["optimizer"] + (", offloaded" if row["offload"] == "True" else "")
        first = f"{row['model']} | {row['gpus']} | {name} | {row['checkpointing']} | {int(row['tokens']):,}"
        last = f"{row['plan_gib']} | {row['simulated_gib']} | {row['ratio']} | {row['measured_gib'] or 'open'}"
        lines.append(f"| {first} | {last} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: run the real step as well"
    )
    card = parser.parse_args().device == "cuda"
    name = torch.cuda.get_device_name() if card else f"CPU ({platform.machine()}), simulation"
    size = torch.cuda.get_device_properties(0).total_memory / GIB if card else 0.0
    rows = []
    for model, world, optimizer, checkpointing, tokens in CASES:
        config, shape = make_config(model, world, optimizer, checkpointing, tokens), SHAPES[model]
        wanted, found = predicted(config, shape, world), simulate(config, shape, world)
        plan_gib, simulated_gib = max(wanted.values()), max(found.update, found.step)
        real = measured(config, shape) if world == 1 and plan_gib < USABLE * size else None
        row = {"date": datetime.now(UTC).date(), "device": name, "torch": torch.__version__}
        row |= {
            "transformers": transformers.__version__,
            "model": model,
            "gpus": world,
            "optimizer": optimizer,
        }
        row |= {"offload": config.optim.offload, "checkpointing": checkpointing, "tokens": tokens}
        for phase in ("update", "step"):
            row |= {f"plan_{phase}_gib": f"{wanted[phase]:.2f}"}
            row |= {f"simulated_{phase}_gib": f"{getattr(found, phase):.2f}"}
        row |= {"plan_gib": f"{plan_gib:.2f}", "simulated_gib": f"{simulated_gib:.2f}"}
        row |= {"ratio": f"{plan_gib / simulated_gib:.3f}"}
        row |= {"measured_gib": f"{max(real.update, real.step):.2f}" if real else ""}
        print(*row.values(), flush=True)
        rows.append({key: str(value) for key, value in row.items()})
    write(RESULTS / "memory_plan.csv", rows)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- python bench/trainer/memory.py -->")
    after = rest.partition("<!-- end -->")[2]
    made = (
        f"{before}<!-- python bench/trainer/memory.py -->\n\n{table(rows)}\n\n<!-- end -->{after}"
    )
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
