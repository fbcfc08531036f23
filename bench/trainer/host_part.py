"""The host's part of an update of 5.9 million tokens: everything besides the model, in processor seconds.

    python bench/trainer/host_part.py       writes bench/results/host_part_cpu.csv

One rank has 128 episodes of 39 turns with ALFWorld's sizes: prompts of 1,000 tokens, responses of
150, observations of 50. The cost of completing a turn, whose lists of tokens and numbers become
arrays, is included. The model's passes are left out; log-probs and entropies are drawn at random.
Prompts are random tokens, so nothing is shared. In a second case, all prompts of a group begin with
the same 400 tokens.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, cpu_name, write
from paw.algo import loss as losses
from paw.algo.advantages import gigpo
from paw.algo.batches import Batch, micro_batches
from paw.algo.packing import Packing
from paw.algo.samples import to_samples
from paw.algo.sequences import minibatches
from paw.algo.token_sums import token_sums
from paw.algo.world_model import select
from paw.model.attention import pack_rows, pack_tree
from paw.rollouts.sync import sampled_by, sampler_mismatch
from paw.rundir.record import code_commit
from paw.types import Group, Outcome, Sample, Task, Trajectory, Turn, Values
from paw_kernels import TokenLoss

GROUPS = 16
MEMBERS = 8
TURNS = 39
PROMPT = 1000
RESPONSE = 150
OBSERVATION = 50
BUDGET = 16_384
CPU = torch.device("cpu")


class Clock:
    """Processor seconds of each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - started


def make_groups(draw: random.Random, shared: int, clock: Clock) -> list[Group]:
    """Groups of random tokens. All prompts of a group begin with the same `shared` tokens."""
    token_pool = [draw.randrange(150_000) for _ in range(200_000)]

    def ids(count: int) -> list[int]:
        pool_start = draw.randrange(len(token_pool) - count)
        return token_pool[pool_start : pool_start + count]

    groups: list[Group] = []
    for number in range(GROUPS):
        task = Task(f"task {number}", "kind")
        beginning = ids(shared)
        trajectories: list[Trajectory] = []
        for member in range(MEMBERS):
            turns: list[Turn] = []
            for step in range(TURNS):
                is_last = step == TURNS - 1
                won = is_last and member % 2 == 1
                parts: dict[str, Any] = {
                    "prompt_ids": beginning + ids(PROMPT - shared),
                    "response_ids": ids(RESPONSE),
                    "sampled_logp": [-0.5 - 0.001 * position for position in range(RESPONSE)],
                    "observation_ids": ids(OBSERVATION),
                }
                with clock.part("arrays of turns"):
                    turn = Turn(
                        **parts,
                        entropy=None,
                        prompt="",
                        response="",
                        outcome=Outcome("x", 10.0 * won, done=is_last, won=won),
                        anchor=f"anchor {step % 7}",
                        version=0,
                    )
                turns.append(turn)
            trajectories.append(Trajectory(task, member, turns))
        groups.append(Group(task, trajectories, number))
    return groups


def update(groups: list[Group], packing: Packing, clock: Clock) -> dict[str, int]:
    """The host's part of an update. Returns how many tokens and micro-batches it had."""
    with clock.part("samples"):
        samples = to_samples(
            groups, separator_ids=[1, 2, 3, 4], encode_observation=list, invalid_penalty=0.1
        )
    with clock.part("advantages"):
        for sample, advantage in zip(samples, gigpo(samples), strict=True):
            sample.advantage = advantage

    policy = score(samples, packing, clock)
    reference = score(samples, packing, clock)
    with clock.part("comparing with the sampler"):
        sampled = np.concatenate([sample.sampled_logp for sample in samples])
        sampler_mismatch(sampled, sampled, sampled_by(samples, 0))
    for sample, (logp, entropy), (ref_logp, _) in zip(samples, policy, reference, strict=True):
        sample.old_logp = logp
        sample.entropy = entropy
        sample.ref_logp = ref_logp
    with clock.part("selection"):
        selection = select(
            samples, alpha=0.75, weight="adaptive", reward_max=10.0, n_groups=len(groups)
        )
        for sample, weight in zip(samples, selection.weights, strict=True):
            sample.wm_weight = weight

    counts = {"tokens": 0, "computed": 0, "micro_batches": 0}
    with clock.part("mini-batches"):
        update_minibatches = minibatches(samples, size=256, seed=0)
    for minibatch in update_minibatches:
        with clock.part("micro-batches"):
            batches = micro_batches(minibatch, packing, with_observation=True, device=CPU)
        for batch in made(batches, clock):
            optimize(batch, minibatch, len(samples), clock)
            counts["computed"] += len(batch.input_ids)
            counts["tokens"] += len(batch.input_ids) + batch.shared_tokens
            counts["micro_batches"] += 1
    return counts


def score(samples: list[Sample], packing: Packing, clock: Clock) -> list[tuple[Values, float]]:
    """What a log-prob pass does besides the model."""
    scored: dict[int, tuple[Values, float]] = {}
    with clock.part("micro-batches"):
        batches = micro_batches(samples, packing, with_observation=False, device=CPU)
    for batch in made(batches, clock):
        bounds(batch, clock)
        logp_N = -torch.rand(len(batch.target))
        entropy_N = torch.rand(len(batch.target))
        with clock.part("reading back"):
            lengths = [len(samples[index].response_ids) for index in batch.indices]
            sample_ends = [0, *accumulate(lengths)]
            offsets: Any = torch.tensor(sample_ends)
            entropies = torch.segment_reduce(
                entropy_N.double(), "mean", offsets=offsets, initial=0, unsafe=True
            )
            logp = logp_N.cpu().numpy()
            spans = pairwise(sample_ends)
            of_samples = zip(batch.indices, spans, entropies.float().tolist(), strict=True)
            for index, (start, end), entropy in of_samples:
                scored[index] = (logp[start:end], entropy)
    return [scored[index] for index in range(len(samples))]


def optimize(batch: Batch, minibatch: list[Sample], update_samples: int, clock: Clock) -> None:
    """What a micro-batch's forward and backward pass does besides the model."""
    with clock.part("what the loss reads"):
        tokens = losses.token_batch(batch, minibatch, update_samples=update_samples, reference=True)
    bounds(batch, clock)
    token_count = len(batch.target)
    result = TokenLoss(
        torch.zeros(()),
        torch.zeros(token_count),
        -torch.rand(token_count),
        torch.rand(token_count),
        torch.ones(token_count, dtype=torch.bool),
    )
    with clock.part("metrics"):
        token_sums(result, tokens, batch, policy=losses.ppo, wm=losses.cmae)


def made(batches: Iterable[Batch], clock: Clock) -> Iterator[Batch]:
    """The batches. The time to make each one, when it is asked for, is measured."""
    iterator = iter(batches)
    while True:
        with clock.part("micro-batches"):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def bounds(batch: Batch, clock: Clock) -> None:
    """Compute the bounds of sequences that attention is given."""
    with clock.part("bounds"):
        if batch.paths is None:
            pack_rows(batch.lengths, kernel="varlen", device=CPU)
        else:
            pack_tree(batch.lengths, batch.paths, kernel="varlen", device=CPU)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        for shared in (0, 400):
            clock = Clock()
            groups = make_groups(random.Random(0), shared, clock)
            packing = Packing(budget=BUDGET, quadratic=1e-5, share_prefixes="auto")
            counts = update(groups, packing, clock)
            cpu_s = sum(clock.seconds.values())
            record: dict[str, Any] = {"repeat": repeat, "shared": shared, **counts}
            record |= {
                "cpu_s": round(cpu_s, 3),
                "us_a_token": round(1e6 * cpu_s / counts["tokens"], 3),
            }
            record |= {part: round(seconds, 3) for part, seconds in clock.seconds.items()}
            record |= {"device": cpu_name(), "torch": torch.__version__, "commit": code_commit()}
            print(record, flush=True)
            records.append(record)
    write(RESULTS / "host_part_cpu.csv", records)


if __name__ == "__main__":
    main()
