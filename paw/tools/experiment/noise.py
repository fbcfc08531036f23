"""`paw experiment noise-gradient`: which share of the world model's gradient lies on tokens that nobody can predict.

After PaW's Figure 2c and appendix A.4 (arXiv 2606.02388), which compare cross-entropy with MAE, before the mask, on
WebShop. With p the probability of an observation token y, e_y its one-hot vector and z the logits, each loss has

    |dL/dlog p| = g,    ||dL/dz|| = g ||e_y - softmax(z)||,    g = 1 (ce), p^q (gce), p (mae), p [p <= rho] (cmae)

Both are summed over tokens, all of equal weight: 1/|o|, lambda and the selection by entropy are left out. Which of the
two the figure shows, and its values, are in no public text we found, nor are the exact rules of A.4.
"""

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from paw.errors import UserError, to_stderr
from paw.plugins import load
from paw.state.record import code_commit
from paw.tools.experiment.results import markdown, percent, write

if TYPE_CHECKING:
    from paw.config import Config

Rule = Callable[[str, str, str], list[tuple[int, int]]]
"""(prompt, action, observation) -> the characters [start, end) of the observation that are noise."""
Slope = Callable[[float, float, float], float]
SLOPES: dict[str, Slope] = {
    "ce": lambda p, rho, q: 1.0,
    "gce": lambda p, rho, q: p**q,
    "mae": lambda p, rho, q: p,
    "cmae": lambda p, rho, q: p if p <= rho else 0.0,
}
"""g(p, rho, q) of each loss."""
LISTED = re.compile(r"(?:On the \w+ \d+|The \w+ \d+ is open\. In it), you see ([^.]+)")
ASIN = re.compile(r"\bB0[A-Z0-9]{8}\b")
SEPARATOR = " [SEP] "


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="run directory (its start model too) or model")
    add("--recipe", help="environment and sampling (default: the run's own configuration)")
    add("--tasks", type=int, default=16, help="training tasks to play in groups (default: %(default)s)")
    add("--rollouts", type=Path, metavar="FILE", help="episodes of `paw rollout` instead of playing")
    add("--rule", help="what is noise: alfworld, webshop or FILE.py:FUNCTION (default: by environment)")
    add("--out", type=Path, default=Path("noise"), help="folder to write (default: %(default)s)")


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Measure the models, those of one stage pooled; write noise.csv, noise.md and noise.png, print the table."""
    if options.tasks < 1:
        raise UserError(f"--tasks {options.tasks}: play at least 1")
    if options.rollouts and len(options.models) > 1:
        raise UserError("--rollouts holds the tokens of one model: give one MODEL")
    from paw.state.export import start_model
    from paw.tools.player import resolve

    opened = [(Path(model), *resolve(model, options.recipe, overrides)) for model in options.models]
    rules = [find_rule(options.rule or config.env.name) for _, config, _ in opened]
    pooled: dict[str, list[Token]] = {}
    for (model, config, path), rule in zip(opened, rules, strict=True):
        is_run = (model / "config.toml").is_file()
        stages = {"start": start_model(model, config), "trained": path} if is_run else {"model": path}
        for stage, weights in stages.items():
            to_stderr(f"{stage}: {weights}")
            pooled.setdefault(stage, []).extend(measure(weights, config, rule, options.tasks, options.rollouts))
    wm = opened[0][1].wm
    lines = [{"stage": stage, **line} for stage, tokens in pooled.items() for line in table(tokens, wm.rho, wm.q)]
    lines = [line | {"models": len(opened), "commit": code_commit()} for line in lines]
    from paw.tools.experiment import figures

    write(options.out, "noise", text=report(lines, wm.rho, wm.q), records=lines, figure=figures.on_noise(lines))
    return 0


def find_rule(name: str) -> Rule:
    """A rule by environment, or the function of a file. Raises UserError where there is none."""
    if name in RULES:
        return RULES[name]
    if ".py:" not in name:
        raise UserError(f"no noise rule '{name}': there are {', '.join(RULES)}, or give --rule FILE.py:FUNCTION")
    return load("rules", name)


def noisy(tokens: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Which tokens, given by their characters, hold one of a span's: it makes the whole token a guess."""
    return [any(start < last and first < end for first, last in spans) for start, end in tokens]


def measure(path: str, config: "Config", rule: Rule, tasks: int, rollouts: Path | None) -> list[Token]:
    """Every observation token of the model's episodes, or of those in a file, at the temperature of training."""
    import torch

    from paw.algo.samples import micro_batches, to_samples
    from paw.model.policy import load_policy, load_tokenizer, pick_device
    from paw.rollout.chat import Chat
    from paw.tools.player import open_player, progress, tell
    from paw.tools.recorded import read_episodes

    groups = []
    if not rollouts:
        with open_player(config, path) as player:
            groups, stats = player.training(0, tasks, progress)
        tell(stats.failures)
    chat, limit = Chat(load_tokenizer(path), config.model.chat_template_kwargs), config.wm.max_tokens
    policy = load_policy(path, dtype=config.model.dtype, device=pick_device(config.model.device))
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
        found, hidden = [], policy.hidden(batch.input_ids, batch.lengths)[batch.position]
        for x, y in zip(hidden.split(256), batch.target[:, None].split(256), strict=True):  # few rows of V at a time
            z = policy.transform(torch.nn.functional.linear(x, policy.head_weight, policy.head_bias))
            p = (z / config.rollout.temperature).softmax(-1)
            at_y = p.gather(1, y)
            spread = p.scatter_add(1, y, -torch.ones_like(at_y)).norm(dim=1)
            found += zip(at_y[:, 0].tolist(), spread.tolist(), strict=True)
        return found

    sizes: Any = {"budget": config.optim.micro_batch_tokens, "quadratic": policy.quadratic, "device": policy.device}
    tokens = []
    with torch.no_grad():
        for batch in micro_batches(samples, with_action=False, with_observation=True, **sizes):
            flags = [flag for i in batch.indices for flag in noise[i]]
            tokens += [Token(flag, *of) for flag, of in zip(flags, policy(partial(rated, batch)), strict=True)]
    return tokens


def table(tokens: list[Token], rho: float, q: float) -> list[dict[str, Any]]:
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
                total, own = (
                    sum(slope(token.p, rho, q) * (token.spread if logits else 1.0) for token in part)
                    for part in (tokens, of)
                )
                shares[key] = own / (total or 1.0)
            lines.append({**facts, "loss": loss, **shares})
    return lines


def report(lines: list[dict[str, Any]], rho: float, q: float) -> str:
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
