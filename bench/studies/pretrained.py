"""The world model's losses on a pretrained model: SmolLM2-135M-Instruct before and after a short `paw sft`.

    python bench/studies/pretrained.py [--folder runs/smollm2]      # ten minutes on a core

Writes bench/results/smollm2.csv. The model is fine-tuned on 192 turns of expert play in small
generated household games, and then plays 32 episodes of other games. Both models are measured on
TURNS turns of each episode, spread evenly. `head` and `hidden` are norms of a loss's gradient in
the head's weights and in the hidden states that the head reads, summed over groups and divided by
another loss's. Rewards include penalties for invalid actions, as in the reference code. No sample
is left out or weighted (lambda 1). Intervals are bootstrapped over episodes, or over groups for the
norms. Whatever the folder already contains is not made again.
"""

import argparse
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, flags, paw, write
from bench.studies.noise_gradient import SLOPES, household, noisy, turns_of
from paw.algo import advantages
from paw.algo.batches import micro_batches
from paw.algo.loss import ce, cmae, joint, ppo, token_batch
from paw.algo.packing import Packing
from paw.algo.samples import to_samples
from paw.config.recipe import load
from paw.model.loading import load_policy, load_tokenizer
from paw.model.policy import Policy
from paw.rollouts.text.chat import Chat
from paw.rundir.record import code_commit
from paw.tools.evaluate.recorded import read_episodes
from paw.types import Group, Sample
from paw_kernels import token_loss, token_stats

SFT = {
    "recipe": "quickstart",
    "run.threads": 1,
    "sft.turns": 192,
    "sft.lr": 1e-4,
    "optim.minibatch_samples": 8,
    "optim.micro_batch_tokens": 1600,
    "optim.warmup_updates": 3,
}
PLAY = {
    "recipe": "quickstart",
    "run.threads": 1,
    "run.seed": 1,
    "rollout.max_response_tokens": 16,
    "rollout.group_size": 4,
    "env.max_turns": 10,
    "tasks": 8,
}
TURNS = 3
ALPHA = 0.5
RHO = 0.2
Q = 0.7
DRAWS = 10_000
Parts = dict[str, list[tuple[float, float]]]
"""Measure -> (what is counted, what it is a share of) for each episode or group."""


@dataclass
class RatedTurn:
    """A turn, rated by the measured model."""

    sample: Sample
    noise: list[bool]
    """Whether each observation token is noise."""
    entropy: float
    """Entropy of the full distribution, mean over the response."""
    sampled_entropy: float
    """The same, estimated from the sampled tokens."""
    p: np.ndarray
    """Probability of each observation token, [tokens]."""
    spread: np.ndarray
    """||e_y - softmax(z)|| of each observation token, [tokens]."""
    selected: bool = False
    """Whether the entropy of the full distribution selects the turn."""
    selected_by_both: bool = False


@dataclass(frozen=True)
class GradientNorms:
    head: float
    hidden: float


def zero(logp: Any, entropy: Any, batch: Any) -> Any:
    return logp * 0.0


LOSSES = {
    "policy": joint(ppo, zero),
    "ce": joint(zero, ce),
    "cmae": joint(zero, partial(cmae, rho=RHO)),
}


def measure(path: Path, episodes: Path) -> tuple[Parts, int]:
    """The parts of every measure, and the number of observation tokens."""
    torch.set_num_threads(1)
    config = load("quickstart", {"model.path": str(path)})
    policy = load_policy(path)
    chat = Chat(load_tokenizer(path))
    groups = read_episodes(episodes, vocabulary=len(policy.head_weight))
    samples, noise = choose_turns(groups, chat, max_tokens=config.wm.max_tokens)
    head = policy.head_weight.detach().requires_grad_()

    parts: Parts = defaultdict(list)
    rated: list[RatedTurn] = []
    for group in sorted({sample.group for sample in samples}):
        places = [index for index, sample in enumerate(samples) if sample.group == group]
        of_group = [samples[index] for index in places]
        turns, norms = measure_group(policy, head, of_group, [noise[index] for index in places])
        rated += turns
        add_norms(parts, norms, learns=any(sample.advantage for sample in of_group))

    select(rated)
    for episode in sorted({turn.sample.trajectory for turn in rated}):
        add_episode(parts, [turn for turn in rated if turn.sample.trajectory == episode])
    for group in groups:
        for trajectory in group.trajectories:
            valid = sum(turn.outcome.valid for turn in trajectory.turns)
            parts["valid actions"].append((valid, len(trajectory.turns)))
            parts["episodes won"].append((trajectory.won, 1))
    return dict(parts), sum(len(turn.p) for turn in rated)


def choose_turns(
    groups: list[Group], chat: Chat, *, max_tokens: int
) -> tuple[list[Sample], list[list[bool]]]:
    """TURNS samples of each episode that have an observation, and which tokens are noise."""
    encode = partial(chat.observation_ids, max_tokens=max_tokens)
    samples = to_samples(
        groups, separator_ids=chat.separator_ids, encode_observation=encode, invalid_penalty=0.1
    )
    for sample, advantage in zip(samples, advantages.grpo(samples), strict=True):
        sample.advantage = advantage
    turns = turns_of(groups)
    last_step = {sample.trajectory: sample.step for sample in samples}

    chosen = []
    noise = []
    for sample, turn in zip(samples, turns, strict=True):
        length = last_step[sample.trajectory] + 1
        steps = {length * part // TURNS for part in range(TURNS)}
        if sample.step not in steps or not len(sample.observation_ids):
            continue
        observation = turn.outcome.observation
        token_spans = chat.observation_spans(observation, max_tokens)
        noise_spans = household(turn.prompt, turn.outcome.action, observation)
        chosen.append(sample)
        noise.append(noisy(token_spans, noise_spans))
    return chosen, noise


def measure_group(
    policy: Policy, head: Tensor, samples: list[Sample], noise: list[list[bool]]
) -> tuple[list[RatedTurn], dict[str, GradientNorms]]:
    """The rated turns of a group, and the norms of each loss's gradient over all of them."""
    for sample in samples:
        sample.wm_weight = 1.0 / len(samples)
    rated: list[RatedTurn] = []
    hidden_squares = dict.fromkeys(LOSSES, 0.0)
    head_gradients = {loss_name: torch.zeros_like(head) for loss_name in LOSSES}
    for batch in micro_batches(
        samples, Packing(budget=2048), with_observation=True, device=policy.device
    ):
        with torch.no_grad():
            hidden = policy.hidden(batch.input_ids, batch.lengths)[batch.position]
            rated += rate(policy, head, hidden, batch, samples, noise)

        tokens = token_batch(batch, samples, update_samples=len(samples))
        for loss_name, loss in LOSSES.items():
            hidden_leaf = hidden.clone().requires_grad_()
            head.grad = None
            result = token_loss(
                hidden_leaf, head, batch.target, loss, tokens, **policy.head_options(1.0)
            )
            result.loss.backward()
            assert hidden_leaf.grad is not None
            assert head.grad is not None
            hidden_squares[loss_name] += float(hidden_leaf.grad.square().sum())
            head_gradients[loss_name] += head.grad

    norms = {}
    for loss_name in LOSSES:
        head_norm = float(head_gradients[loss_name].norm())
        norms[loss_name] = GradientNorms(head=head_norm, hidden=hidden_squares[loss_name] ** 0.5)
    return rated, norms


def rate(
    policy: Policy,
    head: Tensor,
    hidden: Tensor,
    batch: Any,
    samples: list[Sample],
    noise: list[list[bool]],
) -> list[RatedTurn]:
    """The turns of a micro-batch; sets the log-probs of their samples' responses."""
    stats = token_stats(hidden, head, batch.target, **policy.head_options(1.0))
    spread = spreads(hidden[batch.observation], batch.target[batch.observation, None], head)
    rated = []
    target_start = 0
    observation_start = 0
    for index in batch.indices:
        sample = samples[index]
        response_end = target_start + len(sample.response_ids)
        target_end = response_end + len(sample.observation_ids)
        observation_end = observation_start + len(sample.observation_ids)

        response_logp = stats.logp[target_start:response_end].tolist()
        sample.old_logp = response_logp
        sample.sampled_logp = response_logp
        rated_turn = RatedTurn(
            sample,
            noise[index],
            entropy=float(stats.entropy[target_start:response_end].mean()),
            sampled_entropy=-float(np.mean(response_logp)),
            p=np.exp(stats.logp[response_end:target_end].tolist()),
            spread=spread[observation_start:observation_end].numpy(),
        )
        rated.append(rated_turn)
        target_start = target_end
        observation_start = observation_end
    return rated


def spreads(hidden: Tensor, target: Tensor, head: Tensor) -> Tensor:
    """||e_y - softmax(z)|| [T] of hidden states [T, H] and targets y [T, 1]."""
    norms = []
    # A few rows of [V] at a time.
    for hidden_rows, target_rows in zip(hidden.split(256), target.split(256), strict=True):
        probabilities = (hidden_rows @ head.T).softmax(-1)
        minus_one = -torch.ones(target_rows.shape)
        norms.append(probabilities.scatter_add(1, target_rows, minus_one).norm(dim=1))
    return torch.cat(norms)


def add_norms(parts: Parts, norms: dict[str, GradientNorms], *, learns: bool) -> None:
    """Adds the norms of a group's gradients. The policy has a gradient only if the group learns."""
    if learns:
        policy = norms["policy"]
        for loss_name in ("ce", "cmae"):
            parts[f"{loss_name}/policy by head"].append((norms[loss_name].head, policy.head))
            parts[f"{loss_name}/policy by hidden"].append((norms[loss_name].hidden, policy.hidden))
    parts["ce/cmae by head"].append((norms["ce"].head, norms["cmae"].head))


def select(rated: list[RatedTurn]) -> None:
    """Marks the share ALPHA of turns with the highest entropy, and those that both entropies would
    select."""
    selected_count = math.ceil(ALPHA * len(rated) - 1e-9)
    by_entropy = sorted(range(len(rated)), key=lambda index: -rated[index].entropy)
    by_sampled_entropy = sorted(range(len(rated)), key=lambda index: -rated[index].sampled_entropy)
    for index in by_entropy[:selected_count]:
        rated[index].selected = True
        rated[index].selected_by_both = index in by_sampled_entropy[:selected_count]


def add_episode(parts: Parts, turns: list[RatedTurn]) -> None:
    """Adds the measures that are counted over the chosen turns of an episode."""
    probabilities = np.concatenate([turn.p for turn in turns])
    spread = np.concatenate([turn.spread for turn in turns])
    is_noise = np.concatenate([turn.noise for turn in turns])
    parts["tokens on noise"].append((is_noise.sum(), len(probabilities)))
    parts["masked"].append(((probabilities > RHO).sum(), len(probabilities)))

    live_tokens = 0
    total_tokens = 0
    for turn in turns:
        response = len(turn.sample.response_ids)
        live_tokens += response * bool(turn.sample.advantage)
        total_tokens += response
        if turn.selected:
            live_tokens += (turn.p <= RHO).sum()
            total_tokens += len(turn.p)
    parts["live"].append((live_tokens, total_tokens))

    selected = sum(turn.selected for turn in turns)
    selected_by_both = sum(turn.selected_by_both for turn in turns)
    parts["selected by both"].append((selected_by_both, selected))

    for loss_name, slope in SLOPES.items():
        slopes = np.array([slope(float(value), RHO, Q) for value in probabilities])
        for weighting, gradient_size in (
            ("log p", np.ones_like(probabilities)),
            ("logits", spread),
        ):
            gradient = slopes * gradient_size
            of_noise = gradient[is_noise].sum()
            parts[f"{loss_name} gradient on noise by {weighting}"].append(
                (of_noise, gradient.sum())
            )


def intervals(parts: Parts) -> dict[str, tuple[float, float, float, int]]:
    """Measure -> (ratio of sums, low and high end of its 95 % bootstrap interval, number of
    episodes or groups)."""
    rng = np.random.default_rng(0)
    result = {}
    for measure_name, fractions in parts.items():
        pairs = np.array(fractions, dtype=float)
        drawn = rng.integers(len(pairs), size=(DRAWS, len(pairs)))
        sums = pairs[drawn].sum(1)
        lower, upper = np.nanpercentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
        point_estimate = pairs[:, 0].sum() / pairs[:, 1].sum()
        result[measure_name] = (point_estimate, lower, upper, len(pairs))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "smollm2")
    folder = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    start = folder / "start"
    tuned = folder / "tuned"
    episodes = folder / "episodes.jsonl"
    if not (tuned / "config.json").exists():
        paw("data", "smollm2", "--out", start)
        paw("sft", start, *flags(SFT), "--out", tuned)
    if not episodes.exists():
        paw("rollout", tuned, *flags(PLAY), "--out", episodes)

    records = []
    for stage, model_path in (("start", start), ("fine-tuned", tuned)):
        parts, tokens = measure(model_path, episodes)
        for measure_name, (point_estimate, lower, upper, units) in intervals(parts).items():
            record = {
                "stage": stage,
                "measure": measure_name,
                "value": f"{point_estimate:.4g}",
                "low": f"{lower:.4g}",
                "high": f"{upper:.4g}",
                "units": units,
                "observation_tokens": tokens,
                "torch": torch.__version__,
                "device": "cpu",
                "commit": code_commit() or "",
            }
            records.append(record)
    write(RESULTS / "smollm2.csv", records)


if __name__ == "__main__":
    main()
