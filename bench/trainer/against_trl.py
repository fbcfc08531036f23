"""One optimizer step of GRPO: this trainer and TRL's GRPOTrainer on the same model, tokens, advantages, micro-batches.

    pip install --no-deps --target trl trl==1.16.0       # beside this package's own transformers and accelerate
    PYTHONPATH=trl python bench/trainer/against_trl.py        # --dtype bfloat16, --style conversations, --rounds 3

Each side runs in its own process. The sides take turns, so that other load on the machine affects
both. Every call adds its rounds to bench/results/trainer_vs_trl_cpu.csv, one step at a time, and
draws docs/trainer_vs_trl.png. --fresh first drops the rounds of the same model, dtype and style. A
process's first step is not measured. On a GPU the same command writes trainer_vs_trl_gpu.csv; it
has not been run there yet. Exits with 1 if the losses or gradient norms of the sides differ.

TRL runs as in its GRPOTrainer: with its collation, `training_step`, clipping and AdamW, and with
its fused head; without gradient checkpointing and without a log-prob pass of its own (the old
log-probs are those of the step, as when it samples with transformers). TRL has no packing. One
thing favours TRL here: each micro-batch is padded to its own longest sequence, whereas TRL pads to
the longest of the update. On a CPU, TRL's head also runs over prompts and padding. "TRL,
completions only" leaves them out, as TRL does on a GPU, by changing the one switch in its code that
no setting reaches. "compiled" means `model.compile` here and `torch_compile` in TRL. "TRL,
compiled" takes minutes to compile and only runs if it is named.
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
"""The first is the base of every ratio. The last two run on a GPU, or if named."""
MEASURES = ("seconds", "cpu_s", "peak_gib", "body_s", "head_s", "optimizer_s")
COMPARED = MEASURES[:3]
"""Measures for which ratios between sides are also computed."""
LABELS = {
    "TRL, completions only": "TRL, head on\ncompletions only",
    "TRL": "TRL, head on\nprompts too (CPU)",
}
"""Names in the figure for sides whose own names do not explain them."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""The relative difference allowed between losses and between gradient norms.

In bf16, TRL keeps the residual stream in float32; this trainer does not.
"""


def make_samples(style: str, *, vocabulary: int = 49_000) -> list[Sample]:
    """SEQUENCES episodes of random tokens, as samples.

    turns: one turn per episode, with a prompt, a response and an observation of ALFWorld's sizes
    (`paw.tools.plan.plan`). conversations: four turns with about as many tokens in all, to which
    PaW adds none.
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
    """Tokens of each episode up to its last response, without padding or those PaW adds."""
    last_samples = [episode[-1] for episode in episodes(samples)]
    return [len(sample.prompt_ids) + len(sample.response_ids) for sample in last_samples]


@contextmanager
def ours(
    folder: str, dtype: str, samples: list[Sample], *, threads: int, compiled: bool
) -> Iterator[Any]:
    """This trainer's step as a function of the side's name, and its meter."""
    longest = max(row_lengths(samples))
    overrides = {
        "optim.micro_batch_tokens": str(MICRO * (longest + 64)),
        "model.compile": str(compiled).lower(),
    }
    with update.trainer(folder, dtype=dtype, threads=threads, keys=overrides) as (run, meter):
        update.score(run, samples)
        update.choose(samples)
        yield lambda side: update.update(run, samples, paw="PaW" in side), meter


@contextmanager
def trl(
    folder: str, dtype: str, samples: list[Sample], *, liger: bool, compiled: bool
) -> Iterator[Any]:
    """TRL's step as a function of the side's name, and its meter."""
    sys.modules["vllm"] = None  # type: ignore[assignment]  # unused, a minute to import
    import trl.trainer.utils as internals

    on_cpu = not torch.cuda.is_available()
    meter = update.Meter(torch.device("cpu" if on_cpu else "cuda"))
    run = make_grpo_trainer(folder, dtype, cpu=on_cpu, liger=liger, compiled=compiled)
    optimizer = update.warm(run.create_optimizer())
    model = run.accelerator.prepare(run.model)
    if liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False)
    if not compiled:  # a clock inside a graph would break it
        for function_name in ("forward", "backward"):
            meter.watch(internals._ChunkedLogProbFunction, function_name, "head")
        meter.watch(model.base_model, "forward", "body")
    meter.watch(torch.Tensor, "backward", "body")
    meter.watch(run.accelerator, "clip_grad_norm_", "optimizer")
    meter.watch(optimizer, "step", "optimizer")

    def padded(token_rows: list[list[int]], side: str) -> torch.Tensor:
        tensors = [torch.tensor(token_ids) for token_ids in token_rows]
        return internals.pad(tensors, padding_value=0, padding_side=side).to(run.args.device)

    def step(side: str) -> dict[str, float]:
        internals._use_triton = lambda device: not on_cpu or "completions" in side
        response_tokens = sum(len(sample.response_ids) for sample in samples)
        loss = 0.0
        for first_episode in range(0, SEQUENCES, MICRO):
            micro_batch = episodes(samples)[first_episode : first_episode + MICRO]
            batch = trl_batch(micro_batch, response_tokens, padded)
            loss += float(run.training_step(model, batch, response_tokens))
        grad_norm = float(run.accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        model.zero_grad()
        return {"loss": loss, "grad_norm": grad_norm}

    yield step, meter


def make_grpo_trainer(folder: str, dtype: str, *, cpu: bool, liger: bool, compiled: bool) -> Any:
    """TRL's trainer, which gets its batches as they are instead of sampling them."""
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
    micro_batch: list[list[Sample]],
    response_tokens: int,
    padded: Callable[[list[list[int]], str], torch.Tensor],
) -> dict[str, Any]:
    """Episodes in the form that `_generate_and_score_completions` gives them.

    Text of tools is masked out of the loss. `response_tokens` are those of the whole update.
    `padded(rows, side)` makes a padded tensor of rows.
    """
    prompts = [episode[0].prompt_ids.tolist() for episode in micro_batch]
    completions = []
    for episode, prompt in zip(micro_batch, prompts, strict=True):
        completion = [*episode[-1].prompt_ids, *episode[-1].response_ids]
        completions.append(completion[len(prompt) :])
    prompt_ids = padded(prompts, "left")
    advantages = [episode[0].advantage for episode in micro_batch]
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], "left"),
        "completion_ids": padded(completions, "right"),
        "completion_mask": padded([[1] * len(completion) for completion in completions], "right"),
        "tool_mask": padded([response_mask(episode) for episode in micro_batch], "right"),
        "advantages": torch.tensor(advantages, device=prompt_ids.device),
        "num_items_in_batch": torch.tensor(response_tokens, device=prompt_ids.device),
    }


def response_mask(episode: list[Sample]) -> list[int]:
    """1 for each response token and 0 for the tokens in between, starting at the first response."""
    mask: list[int] = []
    prompt_length = len(episode[0].prompt_ids)
    for sample in episode:
        between = len(sample.prompt_ids) - prompt_length - len(mask)
        mask += [0] * between
        mask += [1] * len(sample.response_ids)
    return mask


def work(connection: Any, worker: str, folder: str, dtype: str, style: str, threads: int) -> None:
    """The process of a worker. Measures a step of each side that `connection` names, and sends the
    result.

    First sends {}, or the "error" that keeps Liger from running.
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
            step(worker)  # the first step is slower than the others
            connection.send({})
            with suppress(EOFError):
                while True:
                    connection.send(meter.measure(partial(step, connection.recv())))
    except Exception as error:
        if not liger:
            raise
        connection.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


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
    parser.add_argument("--model", default=MODEL, help="a shape known to paw.tools.plan.shapes")
    parser.add_argument(
        "--fresh", action="store_true", help="first drop the rows of this model, dtype and style"
    )
    options = parser.parse_args()
    if any("TRL" in side for side in options.sides) and not find_spec("trl"):
        print(
            "trl is not installed: pip install --no-deps --target trl trl==1.16.0, then PYTHONPATH=trl, "
            "or leave TRL out: --sides GRPO 'GRPO + PaW'",
            file=sys.stderr,
        )
        return 2
    os.environ["HF_HUB_OFFLINE"] = "1"  # inherited by the processes, so that they look nothing up
    on_gpu = torch.cuda.is_available()
    table_path = RESULTS / f"trainer_vs_trl_{'gpu' if on_gpu else 'cpu'}.csv"
    case = {"model": options.model, "dtype": options.dtype, "style": options.style}
    records: list[dict[str, Any]] = [*read(table_path)] if table_path.exists() else []
    if options.fresh:
        records = [record for record in records if not case.items() <= record.items()]
    measure(options, table_path, case, records)

    of_case = [record for record in records if case.items() <= record.items()]
    if not on_gpu and (options.dtype, options.style) == ("float32", "turns"):
        draw(of_case, ROOT / "docs" / "trainer_vs_trl.png")
    return compare(of_case, TOLERANCE[options.dtype])


def measure(
    options: argparse.Namespace,
    table_path: Path,
    case: dict[str, str],
    records: list[dict[str, Any]],
) -> None:
    """Adds rounds of the case to `records`, and writes the file after each step."""
    folder = update.make_folder(options.model, ROOT / "runs" / "bench" / options.model)
    common = conditions(options)
    connections = start_workers(options, folder)
    sides = [side for side in options.sides if worker_of(side) in connections]
    rounds = [int(record["round"]) for record in records if case.items() <= record.items()]
    first_round = 1 + max(rounds, default=-1)
    for number in range(first_round, first_round + options.rounds):
        in_order = sides if number % 2 else sides[::-1]
        for side in in_order:
            connection = connections[worker_of(side)]
            connection.send(side)
            measured = {
                metric: round(measurement, 5) for metric, measurement in connection.recv().items()
            }
            records.append(case | {"side": side, "round": number} | measured | common)
            write(table_path, records)
            print(side, measured, flush=True)


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Columns common to all rows: the device, the versions and the size of the update."""
    on_gpu = torch.cuda.is_available()
    columns = {
        "date": str(datetime.now(UTC).date()),
        "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
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
    """The process that runs a side. Sides that differ only in a switch of each step share one."""
    return side.replace(" + PaW", "").replace(", completions only", "")


def start_workers(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Starts the processes of the sides. Returns the connection to each one that runs here, and
    prints why the others do not."""
    context = multiprocessing.get_context("spawn")
    connections: dict[str, Any] = {}

    def close_all() -> None:
        for connection in connections.values():
            connection.close()

    atexit.register(close_all)  # so that the workers end however this process ends
    for worker in dict.fromkeys(worker_of(side) for side in options.sides):
        connections[worker], far_end = context.Pipe()
        arguments = (far_end, worker, folder, options.dtype, options.style, options.threads)
        context.Process(target=work, args=arguments, daemon=True).start()
        far_end.close()  # so that the end of the worker raises EOFError here

    for worker, connection in list(connections.items()):
        error = connection.recv().get("error")
        if error:
            print(f"{worker} does not run here: {error}")
            del connections[worker]
    return connections


def medians(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Side -> measure -> median over rounds.

    For measures in COMPARED, "MEASURE / OTHER" is the median of the ratio to the other side in the
    same round.
    """
    by_round = {}
    for record in records:
        values = {metric: float(record.get(metric) or "nan") for metric in MEASURES}
        by_round[record["side"], int(record["round"])] = values

    result: dict[str, dict[str, float]] = {}
    for side in sorted({record["side"] for record in records}, key=SIDES.index):
        rounds = [number for round_side, number in by_round if round_side == side]
        result[side] = {}
        for metric in MEASURES:
            result[side][metric] = median(by_round[side, number][metric] for number in rounds)
        for other_side in SIDES:
            shared = [number for number in rounds if (other_side, number) in by_round]
            if other_side == side or not shared:
                continue
            for metric in COMPARED:
                ratios = []
                for number in shared:
                    other_value = by_round[other_side, number][metric]
                    ratios.append(by_round[side, number][metric] / other_value)
                result[side][f"{metric} / {other_side}"] = median(ratios)
    return result


def table(records: list[dict[str, Any]]) -> str:
    """Medians over rounds, in Markdown, with the ratio to GRPO in the same round in brackets."""
    titles = "| | s | processor s | tokens/s | peak, GiB | body, s | head, s | optimizer, s |"
    table_lines = [titles, "|---|---|---|---|---|---|---|---|"]
    for side, of_side in medians(records).items():
        tokens_a_second = float(records[0]["tokens"]) / of_side["seconds"]
        cells = [
            f"{of_side['seconds']:.1f}",
            f"{of_side['cpu_s']:.1f}",
            f"{tokens_a_second:.0f}",
            f"{of_side['peak_gib']:.2f}",
            f"{of_side['body_s']:.1f}",
            f"{of_side['head_s']:.1f}",
            f"{of_side['optimizer_s']:.1f}",
        ]
        for column, metric in {0: "seconds", 1: "cpu_s", 3: "peak_gib"}.items():
            ratio = of_side.get(f"{metric} / {SIDES[0]}")
            if ratio:
                cells[column] += f" ({ratio:.2f})"
        table_lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(table_lines)


def compare(records: list[dict[str, Any]], tolerance: float) -> int:
    """Prints the table. Returns 1 if TRL's loss or gradient differs from this trainer's, else 0."""
    print(table(records))
    base_record = next((record for record in records if record["side"] == SIDES[0]), records[0])
    for record in records:
        for metric in ("loss", "grad_norm"):
            difference = abs(float(record[metric]) / float(base_record[metric]) - 1)
            if "TRL" in record["side"] and difference > tolerance:
                print(f"{record['side']}: {metric} is {record[metric]}, not {base_record[metric]}")
                return 1
    return 0


@styled
def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draws seconds of a step by part, and peak memory, for each side. Readable on a phone."""
    by_side = medians(records)
    sides = sorted(
        by_side, key=lambda side: side == "TRL"
    )  # TRL as it only runs on a CPU comes last
    sides.reverse()  # bars are drawn from the bottom
    side_names = [LABELS.get(side, side) for side in sides]
    figure = Figure((4.4, 5.2))
    time_axes, memory = figure.subplots(2, 1)

    bar_ends = [0.0] * len(sides)
    colours = {"body": BLUE, "head": VERMILLION, "optimizer": GREEN, "rest": SKY}
    for step_part, colour in colours.items():
        widths = []
        for side, bar_end in zip(sides, bar_ends, strict=True):
            rest = by_side[side]["seconds"] - bar_end
            widths.append(by_side[side].get(f"{step_part}_s", rest))
        time_axes.barh(side_names, widths, 0.62, bar_ends, color=colour, label=step_part)
        bar_ends = [end + width for end, width in zip(bar_ends, widths, strict=True)]
    memory.barh(side_names, [by_side[side]["peak_gib"] for side in sides], 0.62, color=BLUE)

    for panel, metric, unit, label in (
        (time_axes, "seconds", "s", "Seconds"),
        (memory, "peak_gib", "GiB", "Peak memory, GiB"),
    ):
        values = [by_side[side][metric] for side in sides]
        for position, measurement in enumerate(values):
            panel.text(measurement, position, f" {measurement:.3g} {unit}", va="center", color=INK)
        panel.set(xlabel=label, xlim=(0, 1.25 * max(values)))
        panel.grid(visible=False)
    time_axes.legend(
        ncols=4, loc="lower left", bbox_to_anchor=(-0.2, 1.0), handlelength=1, columnspacing=1
    )
    last_record = records[-1]
    conditions = f"{int(last_record['tokens']):,} tokens, {last_record['threads']} threads"
    figure.suptitle(f"One optimizer step of {last_record['model']},\n{conditions}")
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    sys.exit(main())
