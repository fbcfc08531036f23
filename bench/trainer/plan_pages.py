"""What the pages show of `paw plan`: its times beside published runs (docs/memory.md), its output (docs/scale.md).

    python bench/trainer/plan_pages.py      # updates both; arithmetic only, nothing is run

A published run is planned as it was run, with its model, cards, checkpointing and sequences, and
learning from all tokens. Runs whose trainer also wrote the weights for its servers are planned with
engine.transfer = "files". tests/tools/test_plan.py fails if the plan of a `held` run is off by more
than a quarter, or if a page differs from what this program writes.
"""

import contextlib
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import ROOT
from bench.trainer.elementwise import counted_traffic
from paw import cli
from paw.config.recipe import validate
from paw.tools.plan.elementwise import fused_traffic
from paw.tools.plan.plan import CARDS, MFU, STREAMED, Plan, Play
from paw.tools.plan.shapes import SHAPES

MEMORY = ROOT / "docs" / "memory.md"
SCALE = ROOT / "docs" / "scale.md"
TITAN = "torchtitan"
PRIME = "prime-rl"
"""pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (Tables 1 and 3, December 2024,
H100 of 96 GB); PrimeIntellect-ai/prime-rl at 30bf494f, benchmarks/results/BENCHMARKS.md (measured
2026-01-15, H100 of 80 GB)."""


@dataclass(frozen=True)
class Run:
    source: str
    model: str
    gpus: int
    length: int
    """Tokens of a sequence. Each GPU had two sequences per step."""
    published: float
    """Tokens per second, of all GPUs together."""
    checkpointing: str = "full"
    compile: bool = True
    files: bool = False
    lora: int = 0
    held: bool = False

    @property
    def predicted(self) -> float:
        """Tokens per second by the plan, with its passes, optimizer step, and weights to files."""
        sequences = 2 * self.gpus
        micro_batch = 2 if self.source == TITAN else 1  # sequences of a micro-batch
        settings = {
            "model": {
                "path": self.model,
                "checkpointing": self.checkpointing,
                "compile": self.compile,
            },
            "lora": {"rank": self.lora},
            "engine": {"type": "server", "urls": "http://localhost:1", "transfer": "files"},
            "policy": {"kl_coef": 0.0},
            "wm": {"enabled": False},
            "optim": {
                "minibatch_samples": sequences,
                "micro_batch_tokens": micro_batch * self.length,
            },
        }
        play = Play(sequences, 1, 1, prompt=0, response=self.length, observation=0)
        plan = Plan(
            validate(settings, origin=self.model),
            SHAPES[self.model],
            gpus=self.gpus,
            gpu_gib=80.0,
            hosts=-(-self.gpus // 8),
            play=play,
        )
        seconds = plan.seconds["update"] + plan.seconds["step"]
        if self.files:
            seconds += plan.seconds["sync"]
        return sequences * self.length / seconds


def _titan(gpus: int, a_gpu: float, *, compiled: bool, held: bool = False) -> Run:
    return Run(TITAN, "Llama-3.1-8B", gpus, 8192, gpus * a_gpu, "selective", compiled, held=held)


RUNS = [
    _titan(8, 5762, compiled=False, held=True),
    _titan(8, 6667, compiled=True, held=True),
    Run(PRIME, "Qwen3-4B", 8, 65536, 28970, files=True, held=True),
    Run(PRIME, "Qwen3-4B", 8, 16384, 26030, files=True, held=True),
    _titan(128, 6514, compiled=True),
    Run(PRIME, "Qwen3-4B", 8, 16384, 49720),
    Run(PRIME, "Qwen3-4B", 8, 65536, 32800, files=True, lora=16),
    Run(PRIME, "Qwen3-4B", 8, 16384, 48720, files=True, lora=16),
    Run(PRIME, "Qwen3-0.6B", 1, 65536, 10150, files=True),
    Run(PRIME, "Qwen3-0.6B", 1, 16384, 11900, files=True),
    Run(PRIME, "Qwen3-30B-A3B", 8, 16384, 6110, files=True),
    Run(PRIME, "Qwen3-30B-A3B", 8, 16384, 33100, files=True, lora=16),
    Run(PRIME, "Qwen3-30B-A3B", 8, 65536, 23390, files=True, lora=16),
]


def table() -> str:
    """The Markdown table of docs/memory.md."""
    table_lines = [
        "| run | model | H100s | sequence | what | published, tokens/s | predicted | predicted / published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in RUNS:
        settings = f"{run.checkpointing} checkpointing, {'compiled' if run.compile else 'eager'}"
        if run.lora:
            settings += f", LoRA {run.lora}"
        if run.files:
            settings += ", weights to files"
        cells = [
            f"**{run.source}**" if run.held else run.source,
            run.model,
            str(run.gpus),
            f"{run.length:,}",
            settings,
            f"{run.published:,.0f}",
            f"{run.predicted:,.0f}",
            f"{run.predicted / run.published:.2f}",
        ]
        table_lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(table_lines)


def traffic_table() -> str:
    """The Markdown table in docs/memory.md about traffic between matrix products."""
    flops, memory_rate, _ = CARDS[80]
    table_lines = [
        "| model | eager layers, MB a token (counted) | fused, at least (estimated) | "
        "eager update on an H100 (predicted) |",
        "|---|---|---|---|",
    ]
    for model in ("Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B"):
        shape = SHAPES[model]
        traffics = (counted_traffic(shape), fused_traffic(shape))
        eager, fused = (shape.layers * (traffic.forward + traffic.backward) for traffic in traffics)
        fused_s = 6 * shape.layers * shape.active_layer / (flops * MFU)
        eager_s = fused_s + (eager - fused) / (STREAMED * memory_rate)
        table_lines.append(
            f"| {model} | {eager / 1e6:.1f} | {fused / 1e6:.1f} | {eager_s / fused_s:.2f} x fused |"
        )
    return "\n".join(table_lines)


def conclusion_of(command: str) -> str:
    """The last paragraph that a `paw plan` command prints, after its tables."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        cli.main(shlex.split(command)[1:])
    _, _, conclusion = output.getvalue().strip().rpartition("\n\n")
    return conclusion


def memory_page(text: str) -> str:
    """The page with current tables between its marks, first of time, then of traffic."""
    tables = iter([table(), traffic_table()])

    def with_table(marks: re.Match[str]) -> str:
        return f"{marks[1]}\n{next(tables)}\n\n{marks[2]}"

    marked = r"(<!-- python bench/trainer/plan_pages.py -->\n).*?(<!-- end -->)"
    return re.sub(marked, with_table, text, flags=re.DOTALL)


def scale_page(text: str) -> str:
    """The page with the current output in each block that begins with `$ paw plan`."""

    def with_output(block: re.Match[str]) -> str:
        command = block[1]
        return f"```text\n$ {command}\n{conclusion_of(command)}\n```"

    return re.sub(r"```text\n\$ (paw plan [^\n]*)\n.*?```", with_output, text, flags=re.DOTALL)


def main() -> None:
    for page, remade in ((MEMORY, memory_page), (SCALE, scale_page)):
        page.write_text(remade(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
