"""One optimizer step of GRPO: this trainer against TRL's GRPOTrainer, same model, tokens, advantages and micro-batches.

    pip install --no-deps --target trl trl==1.16.0       # beside this package's own transformers and accelerate
    PYTHONPATH=trl python bench/trainer/against_trl.py        # --dtype bfloat16, --style conversations, --rounds 3

Each side is a process of its own; they take turns, so that what else the machine does meets both.
Every call adds its rounds to bench/results/trainer_vs_trl_cpu.csv (--fresh begins it anew), a step
at a time, and draws docs/trainer_vs_trl.png. A process's first step is not measured. On a GPU the
same command writes trainer_vs_trl_gpu.csv; that has not been run yet. Ends with code 1 where the
sides' losses or norms of the gradient differ.

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
from collections.abc import Iterator
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
from paw.state.record import code_commit
from paw.tools.plots import BLUE, GREEN, INK, SKY, VERMILLION, styled
from paw.types import Sample

MODEL, SEQUENCES, MICRO = "SmolLM2-135M", 6, 3
SIDES = ("GRPO", "GRPO + PaW", "GRPO, compiled", "GRPO + PaW, compiled",
         "TRL", "TRL, completions only", "TRL, compiled", "TRL, Liger")  # fmt: skip
LABELS = {
    "TRL, completions only": "TRL, head on\ncompletions only",
    "TRL": "TRL, head on\nprompts too (CPU)",
}
"""In the figure, where their names there do not say what they are."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Between losses, and norms of gradients; in bf16 TRL keeps the residual stream in float32, this trainer does not."""


def make_samples(style: str, *, vocabulary: int = 49_000) -> list[Sample]:
    """Random tokens. turns: a prompt, a response and an observation, of ALFWorld's sizes
    (`paw.tools.plan`); or conversations of four turns with about as many tokens, of which PaW runs
    no more."""
    rng = random.Random(0)

    def ids(count: float) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(round(count))]

    samples = []
    for episode in range(SEQUENCES):
        advantage, before = (-1.0) ** episode, ids(rng.gauss(450, 80) if style == "turns" else 200)
        for step in range(1 if style == "turns" else 4):
            answer = ids(min(512.0, rng.lognormvariate(4.62, 0.5)) / (1 if style == "turns" else 2))
            seen = ids(9 + rng.expovariate(1 / 11))
            samples.append(Sample(group=0, trajectory=episode, step=step, continues=step > 0, prompt_ids=before,
                                  response_ids=answer, separator_ids=[1, 2, 3, 4], observation_ids=seen,
                                  advantage=advantage))  # fmt: skip
            before = before + answer + [1, 2, 3, 4] + seen
    return samples


def episodes(samples: list[Sample]) -> list[list[Sample]]:
    return [[sample for sample in samples if sample.trajectory == i] for i in range(SEQUENCES)]


def tokens(samples: list[Sample]) -> int:
    """Without padding and without what PaW adds."""
    return sum(len(its[-1].prompt_ids) + len(its[-1].response_ids) for its in episodes(samples))


@contextmanager
def ours(
    folder: str, dtype: str, samples: list[Sample], *, threads: int, compiled: bool
) -> Iterator[Any]:
    """This trainer's step as a function of the side's name, and its meter."""
    rows = [len(its[-1].prompt_ids) + len(its[-1].response_ids) for its in episodes(samples)]
    keys = {
        "optim.micro_batch_tokens": f"{MICRO * (max(rows) + 64)}",
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
    """TRL's."""
    sys.modules["vllm"] = None  # type: ignore[assignment]  # not used here, and a minute to import
    import trl.trainer.utils as internals
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Fed(GRPOTrainer):
        """Takes batches as they are, in place of sampling them."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

    cpu = not torch.cuda.is_available()
    meter = update.Meter(torch.device("cpu" if cpu else "cuda"))
    config = GRPOConfig(
        output_dir=folder, use_cpu=cpu, per_device_train_batch_size=MICRO, num_generations=SEQUENCES, beta=0.0,
        gradient_accumulation_steps=SEQUENCES // MICRO, gradient_checkpointing=False, bf16=dtype == "bfloat16",
        learning_rate=0.0, loss_type="dapo", report_to=[], use_liger_kernel=liger, disable_tqdm=True,
        torch_compile=compiled,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = Dataset.from_dict({"prompt": ["-"] * SEQUENCES})
    run = Fed(
        model,
        lambda completions, **_: [0.0] * len(completions),
        config,
        data,
        processing_class=tokenizer,
    )
    run.current_gradient_accumulation_steps = SEQUENCES // MICRO
    optimizer, model = update.warm(run.create_optimizer()), run.accelerator.prepare(run.model)
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

    def padded(rows: list[list[int]], *, left: bool) -> torch.Tensor:
        rows_of = [torch.tensor(row) for row in rows]
        return internals.pad(rows_of, padding_value=0, padding_side="left" if left else "right").to(
            run.args.device
        )

    def batch(part: list[list[Sample]], total: int) -> dict[str, Any]:
        """As `_generate_and_score_completions` leaves it; what tools said is masked out of the loss."""
        prompts = [its[0].prompt_ids for its in part]
        whole = [
            (its[-1].prompt_ids + its[-1].response_ids)[len(its[0].prompt_ids) :] for its in part
        ]
        return {
            "prompt_ids": padded(prompts, left=True), "prompt_mask": padded([[1] * len(p) for p in prompts], left=True),
            "completion_ids": padded(whole, left=False),
            "completion_mask": padded([[1] * len(row) for row in whole], left=False),
            "tool_mask": padded([masked(its) for its in part], left=False),
            "advantages": torch.tensor([its[0].advantage for its in part], device=run.args.device),
            "num_items_in_batch": torch.tensor(total, device=run.args.device),
        }  # fmt: skip

    def step(side: str) -> dict[str, float]:
        internals._use_triton = lambda device: not cpu or "completions" in side
        total, loss = sum(len(sample.response_ids) for sample in samples), 0.0
        for start in range(0, SEQUENCES, MICRO):
            loss += float(
                run.training_step(
                    model, batch(episodes(samples)[start : start + MICRO], total), total
                )
            )
        norm = float(run.accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        model.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    yield step, meter


def masked(its: list[Sample]) -> list[int]:
    """1 for each response token of a conversation, 0 for what stands between, from the first response on."""
    found: list[int] = []
    for sample in its:
        found += [0] * (len(sample.prompt_ids) - len(its[0].prompt_ids) - len(found)) + [1] * len(
            sample.response_ids
        )
    return found


def work(pipe: Any, who: str, folder: str, dtype: str, style: str, threads: int) -> None:
    """A process: sends what a step of a side took whenever it is asked to; or why it cannot."""
    torch.set_num_threads(threads)
    samples, liger, compiled = make_samples(style), "Liger" in who, "compiled" in who
    try:
        if "TRL" in who:
            its = trl(folder, dtype, samples, liger=liger, compiled=compiled)
        else:
            its = ours(folder, dtype, samples, threads=threads, compiled=compiled)
        with its as (step, meter):
            step(who)  # a first one is slower
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
    parser.add_argument("--model", default=MODEL, help="a shape that paw.tools.shapes knows")
    parser.add_argument(
        "--fresh", action="store_true", help="drop the rows of this dtype and style that are there"
    )
    options = parser.parse_args()
    if any("TRL" in side for side in options.sides) and not find_spec("trl"):
        print("trl is not installed: pip install --no-deps --target trl trl==1.16.0, then PYTHONPATH=trl, "
              "or leave TRL out: --sides GRPO 'GRPO + PaW'", file=sys.stderr)  # fmt: skip
        return 2
    os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes: nothing is looked up
    gpu, samples = torch.cuda.is_available(), make_samples(options.style)
    path = RESULTS / f"trainer_vs_trl_{'gpu' if gpu else 'cpu'}.csv"
    case = {"model": options.model, "dtype": options.dtype, "style": options.style}
    rows: list[dict[str, Any]] = [*read(path)] if path.exists() else []
    if options.fresh:
        rows = [row for row in rows if not case.items() <= row.items()]
    folder = update.make_folder(options.model, ROOT / "runs" / "bench" / options.model)
    about = {
        "date": str(datetime.now(UTC).date()),
        "device": torch.cuda.get_device_name() if gpu else cpu_name(),
    }
    about |= {
        "threads": options.threads,
        "commit": code_commit(),
        "sequences": SEQUENCES,
        "tokens": tokens(samples),
    }
    about |= {name: version(name) for name in ("torch", "transformers", "trl") if find_spec(name)}
    processes, context = dict[str, Any](), multiprocessing.get_context("spawn")
    atexit.register(
        lambda: [pipe.close() for pipe in processes.values()]
    )  # they end, whatever ends this one
    of = {
        side: side.replace(" + PaW", "").replace(", completions only", "") for side in options.sides
    }
    for who in dict.fromkeys(of.values()):
        processes[who], theirs = context.Pipe()
        given = (theirs, who, folder, options.dtype, options.style, options.threads)
        context.Process(target=work, args=given, daemon=True).start()
        theirs.close()  # so that one that ends is heard of
    missing = {who: why for who, pipe in processes.items() if (why := pipe.recv().get("error"))}
    print(*(f"{who} does not run here: {why}" for who, why in missing.items()), sep="\n")
    sides = [side for side in options.sides if of[side] not in missing]
    begun = 1 + max((int(row["round"]) for row in rows if case.items() <= row.items()), default=-1)
    for number in range(begun, begun + options.rounds):
        for side in sides[:: 1 if number % 2 else -1]:
            processes[of[side]].send(side)
            found = {key: round(value, 5) for key, value in processes[of[side]].recv().items()}
            rows.append(case | {"side": side, "round": number} | found | about)
            write(path, rows)
            print(side, found, flush=True)
    own = [row for row in rows if case.items() <= row.items()]
    if not gpu and (options.dtype, options.style) == ("float32", "turns"):
        draw(own, ROOT / "docs" / "trainer_vs_trl.png")
    return compare(own, TOLERANCE[options.dtype])


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By side: of each measure, and of the first three over each other side's in the same round."""
    found, keys = (
        dict[str, dict[str, float]](),
        ("seconds", "cpu_s", "peak_gib", "body_s", "head_s", "optimizer_s"),
    )
    by = {
        (row["side"], int(row["round"])): {key: float(row.get(key) or "nan") for key in keys}
        for row in rows
    }
    for side in sorted({row["side"] for row in rows}, key=SIDES.index):
        rounds = [number for name, number in by if name == side]
        found[side] = {key: median(by[side, number][key] for number in rounds) for key in keys}
        for other in SIDES:
            both = [number for number in rounds if (other, number) in by]
            for key in keys[:3] if both and other != side else ():
                found[side][f"{key} / {other}"] = median(
                    by[side, n][key] / by[other, n][key] for n in both
                )
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over rounds, in Markdown; in brackets how many times GRPO's of the same round."""
    names = ["", "s", "processor s", "tokens/s", "peak, GiB", "body, s", "head, s", "optimizer, s"]
    lines = [f"| {' | '.join(names)} |".replace("|  |", "| |"), "|---" * len(names) + "|"]
    for side, found in medians(rows).items():
        rate = float(rows[0]["tokens"]) / found["seconds"]
        cells = [
            f"{found['seconds']:.1f}",
            f"{found['cpu_s']:.1f}",
            f"{rate:.0f}",
            f"{found['peak_gib']:.2f}",
        ]
        cells += [f"{found[key]:.1f}" for key in ("body_s", "head_s", "optimizer_s")]
        for place, key in {0: "seconds", 1: "cpu_s", 3: "peak_gib"}.items():
            if over := found.get(f"{key} / {SIDES[0]}"):
                cells[place] += f" ({over:.2f})"
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(rows: list[dict[str, Any]], tolerance: float) -> int:
    """Print the table; 1 where TRL's loss or gradient is not this trainer's."""
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
    """Seconds of a step by part, and peak memory, of each side; readable at the width of a phone."""
    found, about = medians(rows), rows[-1]
    sides = sorted(found, key=lambda side: side == "TRL")[
        ::-1
    ]  # what runs on a CPU alone comes last
    figure = Figure((4.4, 5.2))
    times, memory = figure.subplots(2, 1)
    names = [LABELS.get(side, side) for side in sides]
    left = [0.0] * len(sides)
    for part, colour in {"body": BLUE, "head": VERMILLION, "optimizer": GREEN, "rest": SKY}.items():
        pairs = [(found[side], at) for side, at in zip(sides, left, strict=True)]
        spent = [of.get(f"{part}_s", of["seconds"] - at) for of, at in pairs]
        times.barh(names, spent, 0.62, left, color=colour, label=part)
        left = [a + b for a, b in zip(left, spent, strict=True)]
    memory.barh(names, [found[side]["peak_gib"] for side in sides], 0.62, color=BLUE)
    for axes, key, unit, label in (
        (times, "seconds", "s", "Seconds"),
        (memory, "peak_gib", "GiB", "Peak memory, GiB"),
    ):
        for place, side in enumerate(sides):
            axes.text(
                found[side][key], place, f" {found[side][key]:.3g} {unit}", va="center", color=INK
            )
        axes.set(xlabel=label, xlim=(0, 1.25 * max(of[key] for of in found.values())))
        axes.grid(visible=False)
    times.legend(
        ncols=4, loc="lower left", bbox_to_anchor=(-0.2, 1.0), handlelength=1, columnspacing=1
    )
    of = f"{int(about['tokens']):,} tokens, {about['threads']} threads"
    figure.suptitle(f"One optimizer step of {about['model']},\n{of}")
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    sys.exit(main())
