"""One update of GRPO + PaW, by the trainer's own code, with the keys that are given.

    python bench/gpu/updates.py --model Qwen2.5-0.5B --keys model.compile=true --out update.json

The weights are random, of a shape that `paw.tools.plan.shapes` knows ("quickstart" is a tiny one),
and the tokens are random too: nothing is downloaded. GROUPS x MEMBERS turns are learnt from, each
with a prompt of which three quarters are those of its group. The learning rate is 0, so that every
update is the same. Writes medians of REPEATS updates after a first one, which compiles.
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
"""Tokens of a turn: of its prompt the group's part and the turn's own, then what follows."""
SMALL = {"shared": 96, "own": 32, "response": 8, "observation": 4}
"""The same for the model "quickstart"."""
SMALL_VOCABULARY = 200
VOCABULARY = 100_000


def samples(sizes: dict[str, int], vocabulary: int) -> list[Sample]:
    """GROUPS x MEMBERS turns of random tokens, the prompts of a group with a common beginning."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(count)]

    rows = []
    for group in range(GROUPS):
        shared = ids(sizes["shared"])
        for member in range(MEMBERS):
            row = Sample(
                group=group,
                trajectory=member,
                step=0,
                prompt_ids=shared + ids(sizes["own"]),
                response_ids=ids(sizes["response"]),
                separator_ids=ids(4),
                observation_ids=ids(sizes["observation"]),
                advantage=1.0 if member % 2 else -1.0,
            )
            rows.append(row)
    return rows


def measure(model: str, keys: dict[str, str], folder: Path) -> dict[str, float]:
    """Seconds of the first update, and of a later one; its tokens a second and peak GiB.

    Tokens are those of all turns, however often they are computed, so that settings compare.
    """
    is_small = model == "quickstart"
    rows = samples(SMALL if is_small else SIZES, SMALL_VOCABULARY if is_small else VOCABULARY)
    tokens = 0
    for row in rows:
        tokens += len(row.prompt_ids) + len(row.response_ids)
        tokens += len(row.separator_ids) + len(row.observation_ids)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    with trainer(make_folder(model, folder), dtype=dtype, keys=keys) as (run, meter):
        score(run, rows)
        choose(rows)
        step = partial(update, run, rows, paw=True)
        first = meter.measure(step)
        later = [meter.measure(step) for _ in range(REPEATS)]
    seconds = median(repeat["seconds"] for repeat in later)
    return {
        "first": first["seconds"],
        "update": seconds,
        "tokens": tokens / seconds,
        "peak": max(repeat["peak_gib"] for repeat in later),
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
