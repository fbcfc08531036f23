"""One optimizer step of GRPO: this trainer against TRL's GRPOTrainer, same model, tokens, advantages and micro-batches.

    pip install --no-deps --target trl trl==1.16.0       # beside this package's own transformers and accelerate
    PYTHONPATH=trl python bench/trainer/against_trl.py        # --dtype bfloat16, --style conversations, --rounds 3

Each side is a process of its own; they take turns, so that what else the machine does meets both.
Every call adds its rounds to bench/results/trainer_vs_trl_cpu.csv (--fresh first drops those of the
same model, dtype and style), a step at a time, and draws docs/trainer_vs_trl.png. A process's first
step is not measured. On a GPU the same command writes trainer_vs_trl_gpu.csv; that has not been run
yet. Exits with 1 if the sides' losses or norms of the gradient differ.

TRL is as its GRPOTrainer runs it: its collation, `training_step`, clipping and AdamW, without
gradient checkpointing, with its fused head, without a log-prob pass of its own (old log-probs are
those of the step, as they are while it samples by transformers). It has no packing. Kinder than
TRL: it pads to the longest of the update, here each micro-batch has its own longest. On a CPU its
head runs over prompts and padding as well. "TRL, completions only" has it leave them out, as it
does on a GPU: its code with that one switch turned, which no setting does. "compiled":
`model.compile` here, `torch_compile` there. "TRL, compiled", which compiles for minutes, runs only
when it is named.
"""

import argparse
import atexit
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, cpu_name, read, write
from bench.trainer import update
from paw.rundir.record import code_commit
from paw.tools.report.plots import BLUE, GREEN, INK, SKY, VERMILLION, styled
from paw.types import Sample

MODEL = "SmolLM2-135M"
SEQUENCES = 6
"""Episodes of an update."""
MICRO = 3
"""Sequences of a micro-batch."""
SIDES = (
    "GRPO",
    "GRPO + PaW",
    "GRPO, compiled",
    "GRPO + PaW, compiled",
    "TRL",
    "TRL, completions only",
    "TRL, compiled",
    "TRL, Liger",
)
"""The first is the base of every ratio. The last two run on a GPU, or if they are named."""
MEASURES = ("seconds", "cpu_s", "peak_gib", "body_s", "head_s", "optimizer_s")
COMPARED = MEASURES[:3]
"""Measures of which ratios between sides are made, too."""
LABELS = {
    "TRL, completions only": "TRL, head on\ncompletions only",
    "TRL": "TRL, head on\nprompts too (CPU)",
}
"""Names in the figure of sides whose own name does not explain them."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""The relative difference allowed between losses, and between norms of gradients.

In bf16 TRL keeps the residual stream in float32, this trainer does not.
"""


def make_samples(style: str, *, vocabulary: int = 49_000) -> list[Sample]:
    """Samples of random tokens, SEQUENCES episodes.

    turns: one turn an episode, a prompt, a response and an observation of ALFWorld's sizes
    (`paw.tools.plan.plan`). conversations: four turns with about as many tokens, to which PaW adds none.
    """
    rng = random.Random(0)

    def ids(count: float) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(round(count))]

    is_turns = style == "turns"
    separator = [1, 2, 3, 4]
    samples = []
    for episode in range(SEQUENCES):
        prompt = ids(rng.gauss(450, 80) if is_turns else 200)
        for step in range(1 if is_turns else 4):
            length = min(512.0, rng.lognormvariate(4.62, 0.5))
            response = ids(length if is_turns else length / 2)
            observation = ids(9 + rng.expovariate(1 / 11))
            samples.append(
                Sample(
                    group=0,
                    trajectory=episode,
                    step=step,
                    continues=step > 0,
                    prompt_ids=prompt,
                    response_ids=response,
                    separator_ids=separator,
                    observation_ids=observation,
                    advantage=(-1.0) ** episode,
                )
            )
            prompt = prompt + response + separator + observation
    return samples


def episodes(samples: list[Sample]) -> list[list[Sample]]:
    """The samples of each episode, in order."""
    return [[sample for sample in samples if sample.trajectory == i] for i in range(SEQUENCES)]


def row_lengths(samples: list[Sample]) -> list[int]:
    """Tokens of each episode up to its last response: without padding and without what PaW adds."""
    last_samples = [episode[-1] for episode in episodes(samples)]
    return [len(sample.prompt_ids) + len(sample.response_ids) for sample in last_samples]


@contextmanager
def ours(
    folder: str, dtype: str, samples: list[Sample], *, threads: int, compiled: bool
) -> Iterator[Any]:
    """This trainer's step as a function of the side's name, and its meter."""
    longest = max(row_lengths(samples))
    keys = {
        "optim.micro_batch_tokens": str(MICRO * (longest + 64)),
        "model.compile": str(compiled).lower(),
    }
    with update.trainer(folder, dtype=dtype, threads=threads, keys=keys) as (run, meter):
        update.score(run, samples)
        update.choose(samples)
        yield lambda side: update.update(run, samples, paw="PaW" in side), meter


@contextmanager
def trl(
    folder: str, dtype: str, samples: list[Sample], *, liger: bool, compiled: bool
) -> Iterator[Any]:
    """TRL's step as a function of the side's name, and its meter."""
    sys.modules["vllm"] = None  # type: ignore[assignment]  # not used here, and a minute to import
    import trl.trainer.utils as internals

    cpu = not torch.cuda.is_available()
    meter = update.Meter(torch.device("cpu" if cpu else "cuda"))
    run = make_grpo_trainer(folder, dtype, cpu=cpu, liger=liger, compiled=compiled)
    optimizer = update.warm(run.create_optimizer())
    model = run.accelerator.prepare(run.model)
    if liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False)
    if not compiled:  # a clock inside a graph would cut it
        for name in ("forward", "backward"):
            meter.watch(internals._ChunkedLogProbFunction, name, "head")
        meter.watch(model.base_model, "forward", "body")
    meter.watch(torch.Tensor, "backward", "body")
    meter.watch(run.accelerator, "clip_grad_norm_", "optimizer")
    meter.watch(optimizer, "step", "optimizer")

    def padded(rows: list[list[int]], side: str) -> torch.Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return internals.pad(tensors, padding_value=0, padding_side=side).to(run.args.device)

    def step(side: str) -> dict[str, float]:
        internals._use_triton = lambda device: not cpu or "completions" in side
        total = sum(len(sample.response_ids) for sample in samples)
        loss = 0.0
        for start in range(0, SEQUENCES, MICRO):
            part = episodes(samples)[start : start + MICRO]
            batch = trl_batch(part, total, padded)
            loss += float(run.training_step(model, batch, total))
        norm = float(run.accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        model.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    yield step, meter


def make_grpo_trainer(folder: str, dtype: str, *, cpu: bool, liger: bool, compiled: bool) -> Any:
    """TRL's trainer, to which batches are given as they are, instead of sampling them."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Fed(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=cpu,
        per_device_train_batch_size=MICRO,
        num_generations=SEQUENCES,
        beta=0.0,
        gradient_accumulation_steps=SEQUENCES // MICRO,
        gradient_checkpointing=False,
        bf16=dtype == "bfloat16",
        learning_rate=0.0,
        loss_type="dapo",
        report_to=[],
        use_liger_kernel=liger,
        disable_tqdm=True,
        torch_compile=compiled,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    run = Fed(
        model,
        lambda completions, **_: [0.0] * len(completions),
        config,
        Dataset.from_dict({"prompt": ["-"] * SEQUENCES}),
        processing_class=tokenizer,
    )
    run.current_gradient_accumulation_steps = SEQUENCES // MICRO
    return run


def trl_batch(
    part: list[list[Sample]], total: int, padded: Callable[[list[list[int]], str], torch.Tensor]
) -> dict[str, Any]:
    """Episodes as `_generate_and_score_completions` leaves them: tools' text is masked out of the
    loss.

    `total`: response tokens of the update. `padded(rows, side)` makes a tensor of rows.
    """
    prompts = [episode[0].prompt_ids.tolist() for episode in part]
    completions = []
    for episode, prompt in zip(part, prompts, strict=True):
        row = [*episode[-1].prompt_ids, *episode[-1].response_ids]
        completions.append(row[len(prompt) :])
    prompt_ids = padded(prompts, "left")
    advantages = [episode[0].advantage for episode in part]
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], "left"),
        "completion_ids": padded(completions, "right"),
        "completion_mask": padded([[1] * len(row) for row in completions], "right"),
        "tool_mask": padded([response_mask(episode) for episode in part], "right"),
        "advantages": torch.tensor(advantages, device=prompt_ids.device),
        "num_items_in_batch": torch.tensor(total, device=prompt_ids.device),
    }


def response_mask(episode: list[Sample]) -> list[int]:
    """From the first response on: 1 for each response token, 0 for the tokens between responses."""
    mask: list[int] = []
    prompt_length = len(episode[0].prompt_ids)
    for sample in episode:
        between = len(sample.prompt_ids) - prompt_length - len(mask)
        mask += [0] * between
        mask += [1] * len(sample.response_ids)
    return mask


def work(pipe: Any, worker: str, folder: str, dtype: str, style: str, threads: int) -> None:
    """The process of a worker: measures a step of each side that `pipe` names, and sends the row.

    First sends {}, or with Liger the "error" that keeps it from running.
    """
    torch.set_num_threads(threads)
    samples = make_samples(style)
    liger = "Liger" in worker
    compiled = "compiled" in worker
    try:
        if "TRL" in worker:
            opened = trl(folder, dtype, samples, liger=liger, compiled=compiled)
        else:
            opened = ours(folder, dtype, samples, threads=threads, compiled=compiled)
        with opened as (step, meter):
            step(worker)  # the first step is slower
            pipe.send({})
            with suppress(EOFError):
                while True:
                    pipe.send(meter.measure(partial(step, pipe.recv())))
    except Exception as error:
        if not liger:
            raise
        pipe.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--dtype", choices=[*TOLERANCE], default="float32")
    parser.add_argument("--style", choices=["turns", "conversations"], default="turns")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=SIDES,
        metavar="SIDE",
        default=SIDES[: 8 if torch.cuda.is_available() else 6],
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default=MODEL, help="a shape that paw.tools.plan.shapes knows")
    parser.add_argument(
        "--fresh", action="store_true", help="drop the rows of this dtype and style that are there"
    )
    options = parser.parse_args()
    if any("TRL" in side for side in options.sides) and not find_spec("trl"):
        print("trl is not installed: pip install --no-deps --target trl trl==1.16.0, then PYTHONPATH=trl, "
              "or leave TRL out: --sides GRPO 'GRPO + PaW'", file=sys.stderr)  # fmt: skip
        return 2
    os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes: nothing is looked up
    gpu = torch.cuda.is_available()
    path = RESULTS / f"trainer_vs_trl_{'gpu' if gpu else 'cpu'}.csv"
    case = {"model": options.model, "dtype": options.dtype, "style": options.style}
    rows: list[dict[str, Any]] = [*read(path)] if path.exists() else []
    if options.fresh:
        rows = [row for row in rows if not case.items() <= row.items()]
    measure(options, path, case, rows)

    of_case = [row for row in rows if case.items() <= row.items()]
    if not gpu and (options.dtype, options.style) == ("float32", "turns"):
        draw(of_case, ROOT / "docs" / "trainer_vs_trl.png")
    return compare(of_case, TOLERANCE[options.dtype])


def measure(
    options: argparse.Namespace, path: Path, case: dict[str, str], rows: list[dict[str, Any]]
) -> None:
    """Adds rounds of the case to `rows`, and writes the file after each step."""
    folder = update.make_folder(options.model, ROOT / "runs" / "bench" / options.model)
    common = conditions(options)
    pipes = start_workers(options, folder)
    sides = [side for side in options.sides if worker_of(side) in pipes]
    rounds = [int(row["round"]) for row in rows if case.items() <= row.items()]
    first_round = 1 + max(rounds, default=-1)
    for number in range(first_round, first_round + options.rounds):
        in_order = sides if number % 2 else sides[::-1]
        for side in in_order:
            pipe = pipes[worker_of(side)]
            pipe.send(side)
            measured = {key: round(value, 5) for key, value in pipe.recv().items()}
            rows.append(case | {"side": side, "round": number} | measured | common)
            write(path, rows)
            print(side, measured, flush=True)


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Columns of every row: the device, the versions and the size of the update."""
    gpu = torch.cuda.is_available()
    columns = {
        "date": str(datetime.now(UTC).date()),
        "device": torch.cuda.get_device_name() if gpu else cpu_name(),
        "threads": options.threads,
        "commit": code_commit(),
        "sequences": SEQUENCES,
        "tokens": sum(row_lengths(make_samples(options.style))),
    }
    for package in ("torch", "transformers", "trl"):
        if find_spec(package):
            columns[package] = version(package)
    return columns


def worker_of(side: str) -> str:
    """The process that runs a side: sides that differ in a switch of each step share one."""
    return side.replace(" + PaW", "").replace(", completions only", "")


def start_workers(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Starts the processes of the sides; returns the pipe of each that runs here, prints why others
    do not."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}

    def close_all() -> None:
        for pipe in pipes.values():
            pipe.close()

    atexit.register(close_all)  # so that the workers end, whatever ends this process
    for worker in dict.fromkeys(worker_of(side) for side in options.sides):
        pipes[worker], far_end = context.Pipe()
        arguments = (far_end, worker, folder, options.dtype, options.style, options.threads)
        context.Process(target=work, args=arguments, daemon=True).start()
        far_end.close()  # so that the end of the process is an EOFError here

    for worker, pipe in list(pipes.items()):
        error = pipe.recv().get("error")
        if error:
            print(f"{worker} does not run here: {error}")
            del pipes[worker]
    return pipes


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By side, the median over rounds of each measure.

    "KEY / OTHER" is the median of a measure in COMPARED over that of the other side in the same
    round.
    """
    by_round = {}
    for row in rows:
        values = {key: float(row.get(key) or "nan") for key in MEASURES}
        by_round[row["side"], int(row["round"])] = values

    result: dict[str, dict[str, float]] = {}
    for side in sorted({row["side"] for row in rows}, key=SIDES.index):
        rounds = [number for name, number in by_round if name == side]
        result[side] = {}
        for key in MEASURES:
            result[side][key] = median(by_round[side, number][key] for number in rounds)
        for other in SIDES:
            shared = [number for number in rounds if (other, number) in by_round]
            if other == side or not shared:
                continue
            for key in COMPARED:
                ratios = [by_round[side, n][key] / by_round[other, n][key] for n in shared]
                result[side][f"{key} / {other}"] = median(ratios)
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over rounds, in Markdown; in brackets how many times GRPO's of the same round."""
    names = ["", "s", "processor s", "tokens/s", "peak, GiB", "body, s", "head, s", "optimizer, s"]
    lines = [f"| {' | '.join(names)} |".replace("|  |", "| |"), "|---" * len(names) + "|"]
    for side, of_side in medians(rows).items():
        rate = float(rows[0]["tokens"]) / of_side["seconds"]
        cells = [
            f"{of_side['seconds']:.1f}",
            f"{of_side['cpu_s']:.1f}",
            f"{rate:.0f}",
            f"{of_side['peak_gib']:.2f}",
            f"{of_side['body_s']:.1f}",
            f"{of_side['head_s']:.1f}",
            f"{of_side['optimizer_s']:.1f}",
        ]
        for column, key in {0: "seconds", 1: "cpu_s", 3: "peak_gib"}.items():
            ratio = of_side.get(f"{key} / {SIDES[0]}")
            if ratio:
                cells[column] += f" ({ratio:.2f})"
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(rows: list[dict[str, Any]], tolerance: float) -> int:
    """Prints the table; returns the exit code, 1 if TRL's loss or gradient is not this
    trainer's."""
    print(table(rows))
    base = next((row for row in rows if row["side"] == SIDES[0]), rows[0])
    for row in rows:
        for key in ("loss", "grad_norm"):
            if "TRL" in row["side"] and abs(float(row[key]) / float(base[key]) - 1) > tolerance:
                print(f"{row['side']}: {key} is {row[key]}, not {base[key]}")
                return 1
    return 0


@styled
def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds of a step by part, and peak memory, of each side; readable at the width of a
    phone."""
    by_side = medians(rows)
    sides = sorted(by_side, key=lambda side: side == "TRL")  # what only a CPU runs comes last
    sides.reverse()  # bars are drawn from the bottom
    names = [LABELS.get(side, side) for side in sides]
    figure = Figure((4.4, 5.2))
    times, memory = figure.subplots(2, 1)

    ends = [0.0] * len(sides)
    for part, colour in {"body": BLUE, "head": VERMILLION, "optimizer": GREEN, "rest": SKY}.items():
        widths = []
        for side, end in zip(sides, ends, strict=True):
            rest = by_side[side]["seconds"] - end
            widths.append(by_side[side].get(f"{part}_s", rest))
        times.barh(names, widths, 0.62, ends, color=colour, label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    memory.barh(names, [by_side[side]["peak_gib"] for side in sides], 0.62, color=BLUE)

    for axes, key, unit, label in (
        (times, "seconds", "s", "Seconds"),
        (memory, "peak_gib", "GiB", "Peak memory, GiB"),
    ):
        values = [by_side[side][key] for side in sides]
        for position, value in enumerate(values):
            axes.text(value, position, f" {value:.3g} {unit}", va="center", color=INK)
        axes.set(xlabel=label, xlim=(0, 1.25 * max(values)))
        axes.grid(visible=False)
    times.legend(
        ncols=4, loc="lower left", bbox_to_anchor=(-0.2, 1.0), handlelength=1, columnspacing=1
    )
    last = rows[-1]
    conditions = f"{int(last['tokens']):,} tokens, {last['threads']} threads"
    figure.suptitle(f"One optimizer step of {last['model']},\n{conditions}")
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    sys.exit(main())
