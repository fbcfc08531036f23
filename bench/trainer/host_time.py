"""What an update costs on a CPU core besides the model: tokenising prompts, advantages, selection, packing.

    python bench/trainer/host_time.py [--repeats 5]

One rank has 16 groups of eight episodes with ALFWorld's sizes (`paw.tools.plan.plan.Play`). Prompts
are text of docs/, encoded by a byte-level BPE of 32,000 tokens that is trained on it, because no
pretrained tokenizer is at hand. Writes bench/results/host_cpu.csv. HOST_S of `paw plan` is the sum
of the medians.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, cpu_name, write
from paw.algo.advantages import gigpo
from paw.algo.batches import micro_batches
from paw.algo.packing import Packing
from paw.algo.samples import to_samples
from paw.algo.sequences import minibatches
from paw.algo.world_model import select
from paw.config.recipe import load
from paw.tools.plan.plan import Play
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


def make_groups(sizes: Play, rng: random.Random) -> list[Group]:
    """Groups of random tokens with these sizes."""

    def ids(count: float) -> list[int]:
        return [rng.randrange(30_000) for _ in range(round(count))]

    def turn(step: int) -> Turn:
        response = ids(sizes.response)
        outcome = Outcome(" ".join(map(str, ids(20))), 0.0, False, False, "")
        logp = [-0.5] * len(response)
        return Turn(
            prompt_ids=ids(sizes.prompt),
            response_ids=response,
            sampled_logp=logp,
            entropy=logp,
            prompt="",
            response="",
            outcome=outcome,
            anchor=f"anchor {step % 7}",
            version=0,
        )

    groups = []
    for number in range(CONFIG.rollout.tasks):
        task = Task(f"task {number}", "kind")
        trajectories = []
        for member in range(CONFIG.rollout.group_size):
            turns = [turn(step) for step in range(round(sizes.turns))]
            trajectories.append(Trajectory(task, member, turns))
        groups.append(Group(task, trajectories, number))
    return groups


def parse_ids(text: str) -> list[int]:
    """The tokens of an observation, whose text lists their numbers."""
    return [int(word) for word in text.split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    rng = random.Random(0)
    sizes = Play.of(CONFIG)
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    corpus = "".join(pages)
    tokenizer = make_tokenizer(pages)
    groups = make_groups(sizes, rng)
    prompt_count = 0
    for group in groups:
        prompt_count += sum(len(trajectory.turns) for trajectory in group.trajectories)
    starts = [rng.randrange(len(corpus) - 4000) for _ in range(prompt_count)]
    characters_per_token = len(corpus) / len(tokenizer.encode(corpus))
    prompt_characters = round(sizes.prompt * characters_per_token)
    prompts = [corpus[prompt_start : prompt_start + prompt_characters] for prompt_start in starts]

    records = []
    for repeat in range(repeats):
        encode_s, _ = timed(lambda: sum(len(tokenizer.encode(prompt)) for prompt in prompts))
        pack_s, packed = timed(lambda: pack(groups))
        record = {
            "date": datetime.now(UTC).date(),
            "cpu": cpu_name(),
            "torch": torch.__version__,
            "repeat": repeat,
            "tokens": packed,
            "encode_us": round(1e6 * encode_s, 4),
            "pack_us": round(1e6 * pack_s, 4),
        }
        print(record, flush=True)
        records.append(record)
    write(RESULTS / "host_cpu.csv", records)
    encode_us = median(record["encode_us"] for record in records)
    pack_us = median(record["pack_us"] for record in records)
    print(f"{encode_us + pack_us:.2f} us a token")


def timed(work: Callable[[], int]) -> tuple[float, int]:
    """Processor seconds per token of `work`, and its number of tokens, which `work` returns."""
    started = time.process_time()
    tokens = work()
    return (time.process_time() - started) / tokens, tokens


def pack(groups: list[Group]) -> int:
    """What an update does before the model runs. Returns the number of packed tokens."""
    samples = to_samples(
        groups, separator_ids=[1, 2, 3, 4], encode_observation=parse_ids, invalid_penalty=0.1
    )
    for sample, advantage in zip(samples, gigpo(samples), strict=True):
        sample.advantage = advantage
    selection = select(
        samples, alpha=0.75, weight="adaptive", reward_max=10.0, n_groups=len(groups)
    )
    for sample, weight in zip(samples, selection.weights, strict=True):
        sample.wm_weight = weight

    tokens = 0
    for minibatch in minibatches(samples, size=CONFIG.optim.minibatch_samples, seed=0):
        batches = micro_batches(
            minibatch,
            Packing(budget=CONFIG.optim.micro_batch_tokens),
            with_observation=True,
            device=torch.device("cpu"),
        )
        tokens += sum(len(batch.input_ids) for batch in batches)
    return tokens


if __name__ == "__main__":
    main()
