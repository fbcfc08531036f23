"""What recording training episodes costs an update: processor seconds and bytes.

    python bench/trainer/episode_log.py     writes bench/results/episode_log_cpu.csv

An update records 4 episodes of 39 turns with ALFWorld's sizes: responses of 150 tokens,
observations of 50, and three of four turns selected. The texts are spans of this repository's
pages, encoded by a byte-level BPE of 8,000 tokens that is trained on them. In the first update, no
pair of tokens has been seen before. Later updates repeat most pairs, as play does.
"""

import argparse
import math
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, cpu_name, write
from paw.algo.batches import Batch
from paw.episode_log import EpisodeLog
from paw.rollouts.text.pieces import TokenTexts
from paw.rundir.log import open_log
from paw.rundir.record import code_commit
from paw.types import Group, Outcome, Sample, Task, Trajectory, Turn

EPISODES = 4
TURNS = 39
RESPONSE = 150
OBSERVATION = 50


def make_tokenizer(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8_000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


class Draw:
    """Draws random spans of the pages, and random numbers."""

    def __init__(self, seed: int) -> None:
        text = "\n".join(
            path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))
        )
        self.tokenizer = make_tokenizer(text)
        self.ids = self.tokenizer.encode(text).ids
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)

    def span(self, count: int) -> list[int]:
        span_start = self.random.randrange(len(self.ids) - count)
        return self.ids[span_start : span_start + count]

    def turn(self) -> Turn:
        observation_ids = self.span(OBSERVATION)
        outcome = Outcome(self.tokenizer.decode(observation_ids), 0.0, False, False, "look")
        response_ids = self.span(RESPONSE)
        return Turn(
            prompt_ids=[1],
            response_ids=response_ids,
            sampled_logp=-self.numpy.exponential(size=RESPONSE),
            entropy=self.numpy.exponential(size=RESPONSE),
            prompt="prompt",
            response=self.tokenizer.decode(response_ids),
            outcome=outcome,
            anchor="",
            version=0,
            observation_ids=observation_ids,
        )

    def groups(self) -> list[Group]:
        groups: list[Group] = []
        for index in range(EPISODES):
            task = Task(f"task {index}", "kind")
            turns = [self.turn() for _ in range(TURNS)]
            groups.append(Group(task, [Trajectory(task, 0, turns)], index))
        return groups


def samples_of(groups: list[Group]) -> list[Sample]:
    samples: list[Sample] = []
    for group in groups:
        for step, turn in enumerate(group.trajectories[0].turns):
            sample = Sample(group.index, group.index, step, turn.prompt_ids, turn.response_ids)
            sample.observation_ids = turn.observation_ids
            sample.wm_weight = 0.0 if step % 4 == 0 else 0.01
            sample.advantage = 0.5
            samples.append(sample)
    return samples


def batches_of(samples: list[Sample]) -> list[tuple[torch.Tensor, Batch]]:
    """Micro-batches of 16 samples, with random log-probs of their targets."""
    batches = []
    nothing = torch.zeros(0)
    for first_sample in range(0, len(samples), 16):
        indices = list(range(first_sample, min(first_sample + 16, len(samples))))
        selected = sum(samples[index].wm_weight > 0 for index in indices)
        logp = -torch.rand(len(indices) * RESPONSE + selected * OBSERVATION)
        batch = Batch(nothing, [], nothing, nothing, nothing, nothing, nothing, indices)
        batches.append((logp, batch))
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=10)
    options = parser.parse_args()
    draw = Draw(seed=0)
    episode_log = EpisodeLog(
        count=EPISODES,
        texts=TokenTexts(lambda ids: draw.tokenizer.decode(ids, skip_special_tokens=False)),
    )
    records = []
    with tempfile.TemporaryDirectory() as folder, open_log(Path(folder)) as log:
        file = Path(folder) / "episodes.jsonl"
        for update in range(1, options.updates + 1):
            groups = draw.groups()
            samples = samples_of(groups)
            batches = batches_of(samples)
            size_before = file.stat().st_size

            started = time.process_time()
            episode_log.start(groups)
            for logp, batch in batches:
                episode_log.observe(logp, batch, samples)
            episode_log.finish(samples)
            log.episodes(update, episode_log.take())
            seconds = time.process_time() - started

            written_bytes = file.stat().st_size - size_before
            turn_count = EPISODES * TURNS
            tokens = turn_count * RESPONSE + math.ceil(turn_count * 0.75) * OBSERVATION
            record = {
                "update": update,
                "episodes": EPISODES,
                "tokens": tokens,
                "bytes": written_bytes,
                "cpu_s": round(seconds, 4),
                "device": cpu_name(),
                "torch": torch.__version__,
                "commit": code_commit(),
            }
            records.append(record)
    write(RESULTS / "episode_log_cpu.csv", records)
    for record in records:
        print(record)


if __name__ == "__main__":
    main()
