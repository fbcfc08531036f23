"""One update of GRPO + PaW with the given keys, by the trainer's own code.

    python bench/gpu/updates.py --model Qwen2.5-0.5B --keys model.compile=true --out update.json

The weights are random, in a shape known to `paw.tools.plan.shapes` ("quickstart" is a tiny one),
and the tokens are random too, so nothing is downloaded. An update learns from GROUPS x MEMBERS
turns. The turns of a group share the first three quarters of their prompts. The learning rate is 0,
so every update is the same. Writes the medians of REPEATS updates after a first one, which
compiles.
"""

import argparse
import json
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.trainer.update import choose, make_folder, score, trainer, update
from paw.errors import UserError, to_stderr
from paw.types import Sample

GROUPS = 8
MEMBERS = 8
REPEATS = 3
SIZES = {"shared": 1536, "own": 512, "response": 128, "observation": 20}
"""Tokens of a turn: the shared and the own part of its prompt, then its response and
observation."""
SMALL = {"shared": 96, "own": 32, "response": 8, "observation": 4}
"""The same for the model "quickstart"."""
SMALL_VOCABULARY = 200
VOCABULARY = 100_000


def samples(sizes: dict[str, int], vocabulary: int) -> list[Sample]:
    """GROUPS x MEMBERS turns of random tokens. Prompts of a group begin with the same tokens."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(count)]

    turn_samples = []
    for group in range(GROUPS):
        shared = ids(sizes["shared"])
        for member in range(MEMBERS):
            turn_sample = Sample(
                group=group,
                trajectory=member,
                step=0,
                prompt_ids=shared + ids(sizes["own"]),
                response_ids=ids(sizes["response"]),
                separator_ids=ids(4),
                observation_ids=ids(sizes["observation"]),
                advantage=1.0 if member % 2 else -1.0,
            )
            turn_samples.append(turn_sample)
    return turn_samples


def measure(model: str, keys: dict[str, str], folder: Path) -> dict[str, float]:
    """Seconds of the first update and of a later one, and the later one's tokens/s and peak GiB.

    Tokens are counted once per turn, however often they are computed, so that settings compare.
    """
    is_small = model == "quickstart"
    turn_samples = samples(
        SMALL if is_small else SIZES, SMALL_VOCABULARY if is_small else VOCABULARY
    )
    tokens = 0
    for turn_sample in turn_samples:
        tokens += len(turn_sample.prompt_ids) + len(turn_sample.response_ids)
        tokens += len(turn_sample.separator_ids) + len(turn_sample.observation_ids)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    with trainer(make_folder(model, folder), dtype=dtype, keys=keys) as (run, meter):
        score(run, turn_samples)
        choose(turn_samples)
        run_update = partial(update, run, turn_samples, paw=True)
        first_update = meter.measure(run_update)
        later_updates = [meter.measure(run_update) for _ in range(REPEATS)]
    seconds = median(repeat["seconds"] for repeat in later_updates)
    return {
        "first": first_update["seconds"],
        "update": seconds,
        "tokens": tokens / seconds,
        "peak": max(repeat["peak_gib"] for repeat in later_updates),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", default="Qwen2.5-0.5B")
    parser.add_argument("--keys", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    keys = dict(word.split("=", 1) for word in options.keys)
    with tempfile.TemporaryDirectory() as scratch:
        measured = measure(options.model, keys, Path(scratch) / "model")
    options.out.write_text(json.dumps(measured), encoding="utf-8")
    print(measured)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        to_stderr(f"paw: {error}")
        sys.exit(2)
