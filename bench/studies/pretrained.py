"""The world model's losses on a model that knows the words: SmolLM2-135M-Instruct before and after a short `paw sft`.

    python bench/studies/pretrained.py [--folder runs/smollm2]      # ten minutes of a core

Writes bench/results/smollm2.csv. The model is fine-tuned on 192 turns of expert play of small
generated household games and plays 32 episodes of others; both models are measured on TURNS turns
of each, evenly. `head` and `hidden`: norms of a loss's gradient in the head's weights, and in the
hidden states it reads, summed over groups, over another's. Rewards are penalties for invalid
actions too, as in the reference code; no sample is left out or weighed (lambda 1). Intervals are
bootstrapped over episodes, those of norms over groups. What the folder holds already is not made
again.
"""

import argparse
import math
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, paw, write
from bench.studies.noise_gradient import SLOPES, household, noisy
from paw.algo import advantages
from paw.algo.loss import ce, cmae, joint, ppo, token_batch
from paw.algo.packing import Packing
from paw.algo.samples import micro_batches, to_samples
from paw.config.recipe import load
from paw.model.loading import load_policy, load_tokenizer
from paw.rollouts.text.chat import Chat
from paw.rundir.record import code_commit
from paw.tools.evaluate.recorded import read_episodes
from paw_kernels import token_loss, token_stats

PLAY = (
    "--recipe",
    "quickstart",
    "--run.threads",
    1,
    "--rollout.max_response_tokens",
    16,
    "--env.max_turns",
    10,
)
SFT = ("--sft.turns", 192, "--sft.lr", 1e-4, "--optim.minibatch_samples", 8, "--optim.micro_batch_tokens", 1600,
       "--optim.warmup_updates", 3)  # fmt: skip
TURNS, ALPHA, RHO, Q, DRAWS = 3, 0.5, 0.2, 0.7, 10_000
Parts = dict[str, list[tuple[float, float]]]
"""By measure, (what is counted, what it is a share of) of each episode or group."""


def zero(logp: Any, entropy: Any, batch: Any) -> Any:
    return logp * 0.0


LOSSES = {
    "policy": joint(ppo, zero),
    "ce": joint(zero, ce),
    "cmae": joint(zero, partial(cmae, rho=RHO)),
}


def measure(path: Path, episodes: Path) -> tuple[Parts, int]:
    """The parts of every measure, and how many observation tokens there were."""
    torch.set_num_threads(1)
    config, policy, chat = (
        load("quickstart", {"model.path": str(path)}),
        load_policy(path),
        Chat(load_tokenizer(path)),
    )
    groups = read_episodes(episodes, vocabulary=len(policy.head_weight))
    limit = config.wm.max_tokens
    encode = partial(chat.observation_ids, max_tokens=limit)
    every = to_samples(
        groups, separator_ids=chat.separator_ids, encode_observation=encode, invalid_penalty=0.1
    )
    turns = [turn for group in groups for episode in group.trajectories for turn in episode.turns]
    for sample, advantage in zip(every, advantages.grpo(every), strict=True):
        sample.advantage = advantage
    last = {sample.trajectory: sample.step for sample in every}
    steps = {i: {(n + 1) * k // TURNS for k in range(TURNS)} for i, n in last.items()}
    pairs = [
        (s, t)
        for s, t in zip(every, turns, strict=True)
        if s.step in steps[s.trajectory] and s.observation_ids
    ]
    samples, turns = [sample for sample, _ in pairs], [turn for _, turn in pairs]
    noise = []
    for turn in turns:
        text = turn.outcome.observation
        noise.append(
            noisy(
                chat.observation_spans(text, limit),
                household(turn.prompt, turn.outcome.action, text),
            )
        )
    parts, told = defaultdict(list), list[dict[str, Any]]()
    head = policy.head_weight.detach().requires_grad_()
    for group in sorted({sample.group for sample in samples}):
        places = [i for i, sample in enumerate(samples) if sample.group == group]
        own = [samples[i] for i in places]
        squares, sums = (
            dict.fromkeys(LOSSES, 0.0),
            {name: torch.zeros_like(head) for name in LOSSES},
        )
        for sample in own:
            sample.wm_weight = 1.0 / len(own)
        for batch in micro_batches(
            own, Packing(budget=2048), with_observation=True, device=policy.device
        ):
            with torch.no_grad():
                read = policy.hidden(batch.input_ids, batch.lengths)[batch.position]
                stats = token_stats(read, head, batch.target, **policy.head_options(1.0))
                logits = (
                    read[batch.observation].split(256),
                    batch.target[batch.observation, None].split(256),
                )
                spread = torch.cat([(x @ head.T).softmax(-1).scatter_add(1, y, -torch.ones(y.shape)).norm(dim=1)
                                    for x, y in zip(*logits, strict=True)])  # fmt: skip
            start, seen = 0, 0
            for i in batch.indices:
                n, m = len(own[i].response_ids), len(own[i].observation_ids)
                logp, start = stats.logp[start : start + n + m].tolist(), start + n + m
                entropy = float(stats.entropy[start - n - m : start - m].mean())
                own[i].old_logp = own[i].sampled_logp = logp[:n]
                of: dict[str, Any] = {
                    "full": entropy,
                    "sampled": -float(np.mean(logp[:n])),
                    "p": np.exp(logp[n:]),
                }
                told.append(
                    {
                        **of,
                        "sample": own[i],
                        "noise": noise[places[i]],
                        "spread": spread[seen : seen + m].numpy(),
                    }
                )
                seen += m
            tokens = token_batch(batch, own, update_samples=len(own))
            for name, loss in LOSSES.items():
                hidden, head.grad = read.clone().requires_grad_(), None
                token_loss(
                    hidden, head, batch.target, loss, tokens, **policy.head_options(1.0)
                ).loss.backward()
                assert hidden.grad is not None and head.grad is not None
                squares[name] += float(hidden.grad.square().sum())
                sums[name] += head.grad
        if any(sample.advantage for sample in own):
            for name in ("ce", "cmae"):
                parts[f"{name}/policy by head"].append(
                    (float(sums[name].norm()), float(sums["policy"].norm()))
                )
                parts[f"{name}/policy by hidden"].append(
                    (squares[name] ** 0.5, squares["policy"] ** 0.5)
                )
        parts["ce/cmae by head"].append((float(sums["ce"].norm()), float(sums["cmae"].norm())))
    count = math.ceil(ALPHA * len(told) - 1e-9)
    ranks = {
        key: sorted(range(len(told)), key=[-of[key] for of in told].__getitem__)
        for key in ("full", "sampled")
    }
    for i, of in enumerate(told):
        full, sampled = (i in ranks[key][:count] for key in ("full", "sampled"))
        of |= {"selected": full, "both": full and sampled}
    for episode in sorted({of["sample"].trajectory for of in told}):
        own = [of for of in told if of["sample"].trajectory == episode]
        p, is_noise, spread = (
            np.concatenate([of[key] for of in own]) for key in ("p", "noise", "spread")
        )
        parts["tokens on noise"].append((is_noise.sum(), len(p)))
        parts["masked"].append(((p > RHO).sum(), len(p)))
        acting = sum(len(of["sample"].response_ids) * bool(of["sample"].advantage) for of in own)
        live = acting + sum((of["p"] <= RHO).sum() for of in own if of["selected"])
        total = sum(len(of["sample"].response_ids) + of["selected"] * len(of["p"]) for of in own)
        parts["live"].append((live, total))
        parts["selected by both"].append(
            (sum(of["both"] for of in own), sum(of["selected"] for of in own))
        )
        for name, slope in SLOPES.items():
            for key, size in (("log p", np.ones_like(p)), ("logits", spread)):
                pull = np.array([slope(float(x), RHO, Q) for x in p]) * size
                parts[f"{name} gradient on noise by {key}"].append(
                    (pull[is_noise].sum(), pull.sum())
                )
    for episode in (episode for group in groups for episode in group.trajectories):
        parts["valid actions"].append(
            (sum(turn.outcome.valid for turn in episode.turns), len(episode.turns))
        )
        parts["episodes won"].append((episode.won, 1))
    return dict(parts), sum(len(of["p"]) for of in told)


def intervals(parts: Parts) -> dict[str, tuple[float, float, float, int]]:
    """Of each measure the ratio of sums, its 95 % bootstrap interval and the number of episodes or groups."""
    found, rng = {}, np.random.default_rng(0)
    for name, of in parts.items():
        pairs = np.array(of, dtype=float)
        drawn = pairs[rng.integers(len(pairs), size=(DRAWS, len(pairs)))].sum(1)
        low, high = np.nanpercentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
        found[name] = (pairs[:, 0].sum() / pairs[:, 1].sum(), low, high, len(pairs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "smollm2")
    folder = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    start, tuned, episodes = (folder / name for name in ("start", "tuned", "episodes.jsonl"))
    if not (tuned / "config.json").exists():
        paw("data", "smollm2", "--out", start)
        paw("sft", start, "--recipe", "quickstart", "--run.threads", 1, *SFT, "--out", tuned)
    if not episodes.exists():
        paw(
            "rollout",
            tuned,
            *PLAY,
            "--run.seed",
            1,
            "--tasks",
            8,
            "--rollout.group_size",
            4,
            "--out",
            episodes,
        )
    rows = []
    for stage, path in (("start", start), ("fine-tuned", tuned)):
        parts, tokens = measure(path, episodes)
        about = {"torch": torch.__version__, "device": "cpu", "commit": code_commit() or ""}
        for name, (value, low, high, units) in intervals(parts).items():
            numbers = {
                "value": f"{value:.4g}",
                "low": f"{low:.4g}",
                "high": f"{high:.4g}",
                "units": units,
            }
            rows.append(
                {"stage": stage, "measure": name, **numbers, "observation_tokens": tokens, **about}
            )
    write(RESULTS / "smollm2.csv", rows)


if __name__ == "__main__":
    main()
