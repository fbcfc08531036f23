"""What an update costs on a CPU core beside the model: tokenising prompts, advantages, selection, packing.

    python bench/trainer/host_time.py [--repeats 5]

One rank, episodes of ALFWorld's sizes (`paw.tools.plan.Play`): 16 groups of eight. Prompts are text
of docs/, encoded by a byte-level BPE of 32,000 tokens that is trained on it, as no pretrained
tokenizer is at hand. Writes bench/results/host_cpu.csv; HOST_S of `paw plan` is the sum of the
medians.
"""

import argparse
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, cpu_name, write
from paw.algo.advantages import gigpo
from paw.algo.samples import micro_batches, minibatches, to_samples
from paw.algo.world_model import select
from paw.recipe import load
from paw.tools.plan import Play
from paw.types import Group, Outcome, Task, Trajectory, Turn

CONFIG = load("alfworld-gigpo-paw")


def make_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=32_000, show_progress=False)
    )
    return tokenizer


def make_groups(play: Play, rng: random.Random) -> list[Group]:
    def ids(count: float) -> list[int]:
        return [rng.randrange(30_000) for _ in range(round(count))]

    def turn(step: int) -> Turn:
        response = ids(play.response)
        outcome = Outcome(" ".join(map(str, ids(20))), 0.0, False, False, "")
        logp = [-0.5] * len(response)
        return Turn(
            ids(play.prompt), response, logp, logp, "", "", outcome, f"anchor {step % 7}", version=0
        )

    limits = CONFIG.rollout
    return [
        Group(
            task := Task(f"task {place}", "kind"),
            [
                Trajectory(task, i, [turn(step) for step in range(round(play.turns))])
                for i in range(limits.group_size)
            ],
            place,
        )
        for place in range(limits.tasks)
    ]


def numbers(text: str) -> list[int]:
    return list(map(int, text.split()))


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    rng, play, cpu = random.Random(0), Play.of(CONFIG), torch.device("cpu")
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer, text = make_tokenizer(texts), "".join(texts)
    groups = make_groups(play, rng)
    prompts = sum(len(t.turns) for group in groups for t in group.trajectories)
    cuts = [rng.randrange(len(text) - 4000) for _ in range(prompts)]
    size = round(play.prompt * len(text) / len(tokenizer.encode(text)))  # characters of a prompt
    rows = []
    for repeat in range(repeats):
        began = time.process_time()
        encoded = sum(len(tokenizer.encode(text[cut : cut + size])) for cut in cuts)
        encode = (time.process_time() - began) / encoded
        began = time.process_time()
        samples = to_samples(
            groups, separator_ids=[1, 2, 3, 4], encode_observation=numbers, invalid_penalty=0.1
        )
        for sample, advantage in zip(samples, gigpo(samples), strict=True):
            sample.advantage = advantage
        chosen = select(
            samples, alpha=0.75, weight="adaptive", reward_max=10.0, n_groups=len(groups)
        )
        for sample, weight in zip(samples, chosen.weights, strict=True):
            sample.wm_weight = weight
        options = {
            "budget": CONFIG.optim.micro_batch_tokens,
            "with_observation": True,
            "device": cpu,
        }
        packed = 0
        for minibatch in minibatches(samples, size=CONFIG.optim.minibatch_samples, seed=0):
            packed += sum(len(batch.input_ids) for batch in micro_batches(minibatch, **options))
        pack = (time.process_time() - began) / packed
        row = {
            "date": datetime.now(UTC).date(),
            "cpu": cpu_name(),
            "torch": torch.__version__,
            "repeat": repeat,
        }
        row |= {
            "tokens": packed,
            "encode_us": round(1e6 * encode, 4),
            "pack_us": round(1e6 * pack, 4),
        }
        print(row, flush=True)
        rows.append(row)
    write(RESULTS / "host_cpu.csv", rows)
    total = sum(median(row[key] for row in rows) for key in ("encode_us", "pack_us"))
    print(f"{total:.2f} us a token")


if __name__ == "__main__":
    main()
