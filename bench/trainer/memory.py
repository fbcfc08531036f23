"""The plan's memory against a simulated update, and against the card if there is one.

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
from paw.config.recipe import validate
from paw.config.sections import Config
from paw.tools.plan.plan import GIB, USABLE, Plan
from paw.tools.plan.shapes import SHAPES, Shape

PAGE = ROOT / "docs" / "memory.md"


def predicted(config: Config, shape: Shape, world: int) -> dict[str, float]:
    """The plan's GiB by phase, of what a simulation has: no reference, engine or CUDA context."""
    plan = Plan(config, shape, gpus=world, gpu_gib=80.0)
    simulated = ("weights", "gradients", "optimizer", "activations", "head", "step")
    gib = {}
    for phase in ("update", "step"):
        gib[phase] = sum(plan.phases[phase].get(part, 0.0) for part in simulated)
    return gib


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
        optimizer = row["optimizer"]
        if row["offload"] == "True":
            optimizer += ", offloaded"
        cells = [
            row["model"],
            row["gpus"],
            optimizer,
            row["checkpointing"],
            f"{int(row['tokens']):,}",
            row["plan_gib"],
            row["simulated_gib"],
            row["ratio"],
            row["measured_gib"] or "open",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: run the real step as well"
    )
    device = f"CPU ({platform.machine()}), simulation"
    card_gib = 0.0
    if parser.parse_args().device == "cuda":
        device = torch.cuda.get_device_name()
        card_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    rows = []
    for model, world, optimizer, checkpointing, tokens in CASES:
        config = make_config(model, world, optimizer, checkpointing, tokens)
        shape = SHAPES[model]
        plan = predicted(config, shape, world)
        simulation = simulate(config, shape, world)
        plan_gib = max(plan.values())
        simulated_gib = max(simulation.update, simulation.step)
        measured_gib = ""
        if world == 1 and plan_gib < USABLE * card_gib:
            real = measured(config, shape)
            measured_gib = f"{max(real.update, real.step):.2f}"
        row = {
            "date": datetime.now(UTC).date(),
            "device": device,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": model,
            "gpus": world,
            "optimizer": optimizer,
            "offload": config.optim.offload,
            "checkpointing": checkpointing,
            "tokens": tokens,
            "plan_update_gib": f"{plan['update']:.2f}",
            "simulated_update_gib": f"{simulation.update:.2f}",
            "plan_step_gib": f"{plan['step']:.2f}",
            "simulated_step_gib": f"{simulation.step:.2f}",
            "plan_gib": f"{plan_gib:.2f}",
            "simulated_gib": f"{simulated_gib:.2f}",
            "ratio": f"{plan_gib / simulated_gib:.3f}",
            "measured_gib": measured_gib,
        }
        print(*row.values(), flush=True)
        rows.append({key: str(value) for key, value in row.items()})
    write(RESULTS / "memory_plan.csv", rows)
    renew_page(rows)


def renew_page(rows: list[dict[str, Any]]) -> None:
    """Puts the table into docs/memory.md."""
    begin, end = "<!-- python bench/trainer/memory.py -->", "<!-- end -->"
    page = PAGE.read_text(encoding="utf-8")
    text_before, _, rest = page.partition(begin)
    _, _, text_after = rest.partition(end)
    PAGE.write_text(f"{text_before}{begin}\n\n{table(rows)}\n\n{end}{text_after}", encoding="utf-8")


if __name__ == "__main__":
    main()
