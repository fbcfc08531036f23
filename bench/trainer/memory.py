"""Compares the plan's memory with a simulated update, and with the card if there is one.

    python bench/trainer/memory.py                  # simulates every case
    python bench/trainer/memory.py --device cuda    # also runs the real step of each case that fits on this card

Writes bench/results/memory_plan.csv, with a column for the card, and the table of docs/memory.md.
The simulation is memory_simulation.py. All tokens of a row except the first are targets, the most
that the head can have.
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


def predicted(config: Config, shape: Shape, gpu_count: int) -> dict[str, float]:
    """The plan's GiB by phase, without the reference, the engine and the CUDA context."""
    plan = Plan(config, shape, gpus=gpu_count, gpu_gib=80.0)
    simulated = ("weights", "gradients", "optimizer", "activations", "head", "step")
    gib_by_phase = {}
    for phase in ("update", "step"):
        gib_by_phase[phase] = sum(plan.phases[phase].get(plan_part, 0.0) for plan_part in simulated)
    return gib_by_phase


def make_config(
    model: str, gpu_count: int, optimizer: str, checkpointing: str, tokens: int
) -> Config:
    """The configuration of a case. On a single GPU, flash-adamw keeps its state on the host."""
    optimizer_keys = {"name": optimizer, "micro_batch_tokens": tokens}
    if optimizer == "flash-adamw":
        optimizer_keys["offload"] = gpu_count == 1
    model_keys = {"path": model, "dtype": "bfloat16", "checkpointing": checkpointing}
    return validate({"model": model_keys, "optim": optimizer_keys}, origin="memory")


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


def table(records: list[dict[str, Any]]) -> str:
    """The Markdown table of docs/memory.md."""
    table_lines = [
        "| model | GPUs | optimizer | checkpointing | tokens | plan, GiB | simulated | plan / simulated | on a GPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        optimizer = record["optimizer"]
        if record["offload"] == "True":
            optimizer += ", offloaded"
        cells = [
            record["model"],
            record["gpus"],
            optimizer,
            record["checkpointing"],
            f"{int(record['tokens']):,}",
            record["plan_gib"],
            record["simulated_gib"],
            record["ratio"],
            record["measured_gib"] or "open",
        ]
        table_lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(table_lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: also run the real step"
    )
    device = f"CPU ({platform.machine()}), simulation"
    card_gib = 0.0
    if parser.parse_args().device == "cuda":
        device = torch.cuda.get_device_name()
        card_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    records = []
    for model, gpu_count, optimizer, checkpointing, tokens in CASES:
        config = make_config(model, gpu_count, optimizer, checkpointing, tokens)
        shape = SHAPES[model]
        plan = predicted(config, shape, gpu_count)
        simulation = simulate(config, shape, gpu_count)
        plan_gib = max(plan.values())
        simulated_gib = max(simulation.update, simulation.step)
        measured_gib = ""
        if gpu_count == 1 and plan_gib < USABLE * card_gib:
            card_peaks = measured(config, shape)
            measured_gib = f"{max(card_peaks.update, card_peaks.step):.2f}"
        record = {
            "date": datetime.now(UTC).date(),
            "device": device,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": model,
            "gpus": gpu_count,
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
        print(*record.values(), flush=True)
        records.append({column: str(value) for column, value in record.items()})
    write(RESULTS / "memory_plan.csv", records)
    renew_page(records)


def renew_page(records: list[dict[str, Any]]) -> None:
    """Writes the table into docs/memory.md."""
    begin_mark = "<!-- python bench/trainer/memory.py -->"
    end_mark = "<!-- end -->"
    page = PAGE.read_text(encoding="utf-8")
    text_before, _, rest_of_page = page.partition(begin_mark)
    _, _, text_after = rest_of_page.partition(end_mark)
    marked_table = f"{begin_mark}\n\n{table(records)}\n\n{end_mark}"
    PAGE.write_text(f"{text_before}{marked_table}{text_after}", encoding="utf-8")


if __name__ == "__main__":
    main()
