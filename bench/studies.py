"""Two studies of the paper's claims: where the world model's gradient lies, and training curves.

    python bench/studies.py noise-gradient runs/quickstart --tasks 16     # Figure 2c and A.4 of arXiv 2606.02388
    python bench/studies.py dynamics study                                # Figures 10 and 11

`noise-gradient`: which share of the gradient is on tokens that nobody can predict. The paper compares cross-entropy
with MAE, before the mask, on WebShop. With p the probability of an observation token y, e_y its one-hot vector and z
the logits, each loss has

    |dL/dlog p| = g,    ||dL/dz|| = g ||e_y - softmax(z)||,    g = 1 (ce), p^q (gce), p (mae), p [p <= rho] (cmae)

Both are summed over tokens, all of equal weight: 1/|o|, lambda and the selection by entropy are left out. Which of the
two the figure shows, and its values, are in no public text we found, nor are the exact rules of A.4.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))

from paw.algo.samples import micro_batches, to_samples
from paw.config import Config
from paw.errors import UserError, to_stderr
from paw.model.dtype import pick_dtype, with_dtype
from paw.model.policy import load_policy, load_tokenizer, pick_device
from paw.plugins import load
from paw.rollouts.chat import Chat
from paw.state.export import start_model
from paw.state.record import code_commit
from paw.tools.experiment.figures import Curve, draw
from paw.tools.experiment.results import Record, interval, percent, write
from paw.tools.player import EPISODES, open_player, resolve, tell
from paw.tools.plots import INK, PALETTE, legend, moving_mean, styled
from paw.tools.recorded import read_episodes
from paw.tools.results import markdown
from paw.tools.rundir import Run, load_run

Rule = Callable[[str, str, str], list[tuple[int, int]]]
"""(prompt, action, observation) -> the characters [start, end) of the observation that are noise."""
SLOPES: dict[str, Callable[[float, float, float], float]] = {
    "ce": lambda p, rho, q: 1.0,
    "gce": lambda p, rho, q: p**q,
    "mae": lambda p, rho, q: p,
    "cmae": lambda p, rho, q: p if p <= rho else 0.0,
}
"""g(p, rho, q) of each loss."""
LISTED = re.compile(r"(?:On the \w+ \d+|The \w+ \d+ is open\. In it), you see ([^.]+)")
ASIN = re.compile(r"\bB0[A-Z0-9]{8}\b")
SEPARATOR = " [SEP] "
CURVES = {
    "success/all": "Success in training (%)",
    "eval/success": "Success on unseen games (%)",
    "policy/entropy": "Policy entropy (nats)",
    "health/valid_actions": "Valid actions (%)",
    "policy/response_tokens": "Response length (tokens)",
    "policy/kl": "KL to the start model (nats)",
    "wm/loss": "World-model loss",
    "wm/lambda": "lambda",
    "optim/gradient_frac": "Tokens with a gradient (%)",
    "wm/masked_frac": "Observation tokens masked (%)",
    "optim/grad_norm": "Gradient norm",
}
"""Metrics that make a panel where a run has them."""
WINDOW = 10
"""Updates of the moving mean."""


class Token(NamedTuple):
    """An observation token."""

    noise: bool
    p: float
    spread: float
    """||e_y - softmax(z)||."""


def household(prompt: str, action: str, observation: str) -> list[tuple[int, int]]:
    """What lies in a place: the list after "you see", unless the prompt already shows that place with that list."""
    return [found.span(1) for found in LISTED.finditer(observation) if found[0] not in prompt]


def webshop(prompt: str, action: str, observation: str) -> list[tuple[int, int]]:
    """ASIN codes and product titles, brands within: the part after a code (results) or before a price (product)."""
    spans, start, parts = [found.span() for found in ASIN.finditer(observation)], 0, observation.split(SEPARATOR)
    for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        if ASIN.fullmatch(before.strip("'")) or after.strip("'").lower().startswith("price:"):
            spans.append((start, start + len(part)))
        start += len(part) + len(SEPARATOR)
    return sorted(spans)


RULES: dict[str, Rule] = {"alfworld": household, "webshop": webshop}
"""By the name of the environment."""


def noise_gradient(options: argparse.Namespace, overrides: dict[str, str]) -> None:
    """Measure the models, those of one stage pooled; write noise.csv, noise.md and noise.png, print the table."""
    if options.tasks < 1:
        raise UserError(f"--tasks {options.tasks}: play at least 1")
    if options.rollouts and len(options.models) > 1:
        raise UserError("--rollouts holds the tokens of one model: give one MODEL")
    opened = [(Path(model), *resolve(model, options.recipe, overrides)) for model in options.models]
    rules = [find_rule(options.rule or config.env.name) for _, config, _ in opened]
    pooled: dict[str, list[Token]] = {}
    for (model, config, path), rule in zip(opened, rules, strict=True):
        is_run = (model / "config.toml").is_file()
        stages = {"start": start_model(model, config), "trained": path} if is_run else {"model": path}
        for stage, weights in stages.items():
            to_stderr(f"{stage}: {weights}")
            pooled.setdefault(stage, []).extend(measure(weights, config, rule, options.tasks, options.rollouts))
    wm, about = opened[0][1].wm, {"models": len(opened), "commit": code_commit()}
    lines = [{"stage": stage, **of, **about} for stage, tokens in pooled.items() for of in table(tokens, wm.rho, wm.q)]
    write(options.out, "noise", text=report(lines, wm.rho, wm.q), records=lines, figure=on_noise(lines))


def find_rule(name: str) -> Rule:
    """A rule by environment, or the function of a file. Raises UserError where there is none."""
    if name not in RULES and ":" not in name:
        raise UserError(f"no noise rule '{name}': there are {', '.join(RULES)}, or give --rule FILE.py:FUNCTION")
    return RULES.get(name) or load("rules", name)


def noisy(tokens: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Which tokens, given by their characters, hold one of a span's: it makes the whole token a guess."""
    return [any(start < last and first < end for first, last in spans) for start, end in tokens]


def measure(path: str, config: Config, rule: Rule, tasks: int, rollouts: Path | None) -> list[Token]:
    """Every observation token of the model's episodes, or of those in a file, at the temperature of training."""
    groups = []
    if not rollouts:
        with open_player(config, path) as player:
            groups, stats = player.training(0, tasks, EPISODES)
        tell(stats.failures)
    chat, limit = Chat(load_tokenizer(path), config.model.chat_template_kwargs), config.wm.max_tokens
    device = pick_device(config.model.device)
    dtype = with_dtype(config, pick_dtype(device)).model.dtype
    policy = load_policy(path, dtype=dtype, device=device)
    if rollouts:
        groups = read_episodes(rollouts, vocabulary=len(policy.head_weight))

    encode = partial(chat.observation_ids, max_tokens=limit)
    samples = to_samples(groups, separator_ids=chat.separator_ids, encode_observation=encode, invalid_penalty=0.0)
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    noise: list[list[bool]] = []
    for sample, turn in zip(samples, turns, strict=True):
        sample.wm_weight, text = 1.0, turn.outcome.observation
        noise.append(noisy(chat.observation_spans(text, limit), rule(turn.prompt, turn.outcome.action, text)))

    def rated(batch: Any) -> list[tuple[float, float]]:
        found, target = [], batch.target[batch.observation]
        hidden = policy.hidden(batch.input_ids, batch.lengths)[batch.position[batch.observation]]
        for x, y in zip(hidden.split(256), target[:, None].split(256), strict=True):  # few rows of V at a time
            z = policy.transform(torch.nn.functional.linear(x, policy.head_weight, policy.head_bias))
            p = (z / config.rollout.temperature).softmax(-1)
            at_y = p.gather(1, y)
            spread = p.scatter_add(1, y, -torch.ones_like(at_y)).norm(dim=1)
            found += zip(at_y[:, 0].tolist(), spread.tolist(), strict=True)
        return found

    sizes: Any = {"budget": config.optim.micro_batch_tokens, "quadratic": policy.quadratic, "device": policy.device}
    tokens = []
    with torch.no_grad():
        for batch in micro_batches(samples, with_observation=True, **sizes):
            flags = [flag for i in batch.indices for flag in noise[i]]
            tokens += [Token(flag, *of) for flag, of in zip(flags, policy(partial(rated, batch)), strict=True)]
    return tokens


def table(tokens: list[Token], rho: float, q: float) -> list[Record]:
    """One line for each class and loss: what the class is and its share of the gradient; UserError without a class."""
    lines = []
    for kind in ("noise", "rest"):
        of = [token for token in tokens if token.noise == (kind == "noise")]
        if not of:
            raise UserError(f"no token of class '{kind}' among {len(tokens)}: give more --tasks or another --rule")
        facts = {"class": kind, "tokens": len(of), "token_share": len(of) / len(tokens)}
        facts |= {"mean_p": fmean(token.p for token in of), "live": fmean(token.p <= rho for token in of)}
        for loss, slope in SLOPES.items():
            shares = {}
            for key, logits in {"by_logp": False, "by_logits": True}.items():
                own, total = (
                    sum(slope(token.p, rho, q) * (token.spread if logits else 1.0) for token in part)
                    for part in (of, tokens)
                )
                shares[key] = own / (total or 1.0)
            lines.append({**facts, "loss": loss, **shares})
    return lines


def report(lines: list[Record], rho: float, q: float) -> str:
    """The classes, then the share of the gradient on noise."""
    classes = [
        [of["stage"], of["class"], of["tokens"], percent(of["token_share"]), f"{of['mean_p']:.3g}", percent(of["live"])]
        for of in lines
        if of["loss"] == "ce"
    ]
    shares = [
        [of["stage"], of["loss"], percent(of["by_logp"]), percent(of["by_logits"]), None]
        for of in lines
        if of["class"] == "noise"
    ]
    return "\n".join([
        markdown(["model", "class", "tokens", "% of tokens", "mean p", f"% with p <= {rho:g}"], classes),
        "\nPer cent of the gradient on noise:\n",
        markdown(["model", "loss", "by dL/dlog p", "by dL/dlogits", "paper, WebShop"], shares),
        f"\ngce with q = {q:g}. The paper: arXiv 2606.02388, Figure 2c; its values are in no public text we found.",
    ])  # fmt: skip


@styled
def on_noise(lines: Sequence[Record]) -> Figure:
    """Bars by stage: the share of tokens that are noise, then of each loss's gradient."""
    noise = [line for line in lines if line["class"] == "noise"]
    stages = list(dict.fromkeys(line["stage"] for line in noise))
    width = 0.8 / len(stages)
    figure = Figure((7.2, 2.9))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, label in zip(panels, ("by_logp", "by_logits"), ("dL / dlog p", "dL / dlogits"), strict=True):
        for k, stage in enumerate(stages):
            own = [line for line in noise if line["stage"] == stage]
            shown = [100 * share for share in (own[0]["token_share"], *(line[key] for line in own))]
            places = [i + (k - (len(stages) - 1) / 2) * width for i in range(len(shown))]
            bars = axes.bar(places, shown, 0.9 * width, color=PALETTE[k], label=stage)
            axes.bar_label(bars, [f"{value:.0f}" for value in shown], padding=1, fontsize=8)
            axes.set_xticks(range(len(shown)), ["tokens", *(line["loss"] for line in own)])
        axes.set_xlabel(f"by {label}")
    panels[0].set_ylabel("On noise (%)")
    legend(panels[0])
    return figure


def average(runs: Sequence[Run], key: str, window: int = 1) -> Curve:
    """The curve over seeds, each seed's first smoothed by a moving mean; at the updates that all have."""
    smooth = []
    for run in runs:
        steps, values = run.series(key)
        smooth.append(dict(zip(steps, map(float, moving_mean(values, window)), strict=True)) if steps else {})
    return {step: interval([one[step] for one in smooth]) for step in smooth[0] if all(step in one for one in smooth)}


def dynamics(options: argparse.Namespace, overrides: dict[str, str]) -> None:
    """Write dynamics.{csv,png,md}: a line for each run and update; a panel for each metric; first and last means."""
    if overrides:
        raise UserError(f"unknown option '--{next(iter(overrides))}'")
    groups = read(options.runs)
    logged = {key for group in groups.values() for run in group for key in run.metrics}
    shown = {key: label for key, label in CURVES.items() if key in logged}
    if not shown:
        raise UserError(f"{options.runs[0]}: none of its metrics is a training curve")
    panels, rows = {}, []
    for key, label in shown.items():
        window, factor = 1 if key.startswith("eval/") else WINDOW, 100 if label.endswith("(%)") else 1
        row, panels[label] = [label], {}
        for name, group in groups.items():
            having = [run for run in group if key in run.metrics]
            panels[label][name] = average(having, key, window) if having else {}
            ends = [[mean(key, window) or 0.0 for mean in means]
                    for means in ([run.first for run in having], [run.last for run in having])]  # fmt: skip
            row.append("{:.3g} -> {:.3g}".format(*(factor * fmean(end) for end in ends)) if having else "-")
        rows.append(row)
    records = [
        {"group": name, "run": run.name, "update": step} | {key: run.at(key, step) for key in shown}
        for name, group in groups.items()
        for run in group
        for step in sorted({step for key in shown for step in run.metrics.get(key, {})})
    ]
    header = ["", *(f"{name} ({len(group)})" for name, group in groups.items())]
    text = f"""# Training curves

{markdown(header, rows)}

Means over runs of the first and the last {WINDOW} updates, of the first and the last evaluation. In the plot moving
means of {WINDOW} updates, bands: 95 % Student interval over runs. The counterpart of Figures 10 and 11 of
arXiv 2606.02388."""
    write(options.out, "dynamics", text=text, records=records, figure=curves(panels))


def read(folders: list[Path]) -> dict[str, list[Run]]:
    """Runs by group: those of an experiment by variant, others each for itself. UserError where there is none."""
    groups: dict[str, list[Run]] = {}
    for folder in folders:
        if not (folder / "runs").is_dir():
            run = load_run(folder)
            groups.setdefault(run.name, []).append(run)
            continue
        runs = [load_run(path.parent) for path in sorted((folder / "runs").glob("*/metrics.jsonl"))]
        if not (finished := [run for run in runs if run.finished]):
            raise UserError(f"{folder / 'runs'}: no finished run in it")
        for run in finished:
            groups.setdefault(run.name.rpartition("-")[0] or run.name, []).append(run)
    return groups


@styled
def curves(panels: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """A panel for each metric, in it a curve for each group of runs."""
    rows = math.ceil(len(panels) / 3)
    figure = Figure((9.6, 2.5 * rows + 0.4))
    grid = list(figure.subplots(rows, 3, squeeze=False).flat)
    for axes, (label, groups) in zip(grid, panels.items(), strict=False):
        for index, (name, curve) in enumerate(groups.items()):
            draw(axes, curve, index, name, 100 if label.endswith("(%)") else 1)
        axes.set_title(label, fontsize=9, loc="left", color=INK)
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes in grid[max(0, len(panels) - 3) : len(panels)]:
        axes.set_xlabel("Update")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper left", ncols=6)
    return figure


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    studies = parser.add_subparsers(required=True, metavar="STUDY")
    noise = studies.add_parser("noise-gradient", epilog="any key of the configuration can be set: --rollout.tasks 4")
    add = noise.add_argument
    add("models", nargs="+", metavar="MODEL", help="run directory (its start model too) or model")
    add("--recipe", help="environment and sampling (default: the run's own configuration)")
    add("--tasks", type=int, default=16, help="training tasks to play in groups (default: %(default)s)")
    add("--rollouts", type=Path, metavar="FILE", help="episodes of `paw rollout` instead of playing")
    add("--rule", help="what is noise: alfworld, webshop or FILE.py:FUNCTION (default: by environment)")
    add("--out", type=Path, default=Path("noise"), help="folder to write (default: %(default)s)")
    noise.set_defaults(study=noise_gradient)
    plain = studies.add_parser("dynamics")
    plain.add_argument(
        "runs", nargs="+", type=Path, help="run directories, or an experiment's folder (with runs/ in it)"
    )
    plain.add_argument("--out", type=Path, default=Path("dynamics"), help="folder to write (default: %(default)s)")
    plain.set_defaults(study=dynamics)
    options, rest = parser.parse_known_args(words)
    try:
        options.study(
            options, {key.removeprefix("--"): value for key, value in zip(rest[::2], rest[1::2], strict=True)}
        )
    except (UserError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
