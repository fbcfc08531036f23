"""Where the world model's gradient lies: the share on tokens that nobody can predict (Figure 2c and A.4 of the paper).

    python bench/studies/noise_gradient.py runs/quickstart --tasks 16

The paper (arXiv 2606.02388) compares cross-entropy with MAE, before the mask, on WebShop. With p
the probability of an observation token y, e_y its one-hot vector and z the logits, each loss has

    |dL/dlog p| = g,    ||dL/dz|| = g ||e_y - softmax(z)||,    g = 1 (ce), p^q (gce), p (mae), p [p <= rho] (cmae)

Both are summed over tokens, all of equal weight: 1/|o|, lambda and the selection by entropy are
left out. Which of the two the figure shows, and its values, are in no public text we found, nor are
the exact rules of A.4. Writes noise.csv, noise.md and noise.png.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))

from paw.algo.batches import micro_batches
from paw.algo.packing import Packing
from paw.algo.samples import to_samples
from paw.config.plugins import load
from paw.config.sections import Config
from paw.errors import UserError, to_stderr
from paw.model.dtype import pick_dtype, with_dtype
from paw.model.loading import load_policy, load_tokenizer
from paw.model.policy import pick_device
from paw.rollouts.text.chat import Chat
from paw.rundir.record import code_commit
from paw.tools.evaluate.player import EPISODES, open_player, report_failures, resolve
from paw.tools.evaluate.recorded import read_episodes
from paw.tools.evaluate.results import markdown
from paw.tools.experiment.results import Record, percent, write
from paw.tools.report.plots import PALETTE, legend, styled
from paw.tools.train.preparation import start_model
from paw.types import Group, Turn

Rule = Callable[[str, str, str], list[tuple[int, int]]]
"""(prompt, action, observation) -> the characters [start, end) of the observation that are
noise."""
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


class Token(NamedTuple):
    """An observation token."""

    noise: bool
    p: float
    spread: float
    """||e_y - softmax(z)||."""


def household(prompt: str, action: str, observation: str) -> list[tuple[int, int]]:
    """What lies in a place: the list after "you see", unless the prompt already shows that place
    with that list."""
    return [match.span(1) for match in LISTED.finditer(observation) if match[0] not in prompt]


def webshop(prompt: str, action: str, observation: str) -> list[tuple[int, int]]:
    """ASIN codes and product titles with their brands: the part after a code (results) or before a
    price (product)."""
    spans = [match.span() for match in ASIN.finditer(observation)]
    parts = observation.split(SEPARATOR)
    start = 0
    for previous, part, following in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        follows_code = ASIN.fullmatch(previous.strip("'"))
        precedes_price = following.strip("'").lower().startswith("price:")
        if follows_code or precedes_price:
            spans.append((start, start + len(part)))
        start += len(part) + len(SEPARATOR)
    return sorted(spans)


RULES: dict[str, Rule] = {"alfworld": household, "webshop": webshop}
"""By the name of the environment."""


def noise_gradient(options: argparse.Namespace, overrides: dict[str, str]) -> None:
    """Measure the models, pooled by stage; write noise.csv, noise.md and noise.png, print the
    table."""
    if options.tasks < 1:
        raise UserError(f"--tasks {options.tasks}: play at least 1")
    if options.rollouts and len(options.models) > 1:
        raise UserError("--rollouts holds the tokens of one model: give one MODEL")
    opened = [(Path(model), *resolve(model, options.recipe, overrides)) for model in options.models]
    rules = [find_rule(options.rule or config.env.name) for _, config, _ in opened]
    pooled: dict[str, list[Token]] = {}
    for (model, config, path), rule in zip(opened, rules, strict=True):
        is_run = (model / "config.toml").is_file()
        stages = (
            {"start": start_model(model, config), "trained": path} if is_run else {"model": path}
        )
        for stage, weights in stages.items():
            to_stderr(f"{stage}: {weights}")
            tokens = measure(weights, config, rule, options.tasks, options.rollouts)
            pooled.setdefault(stage, []).extend(tokens)

    _, first_config, _ = opened[0]
    rho = first_config.wm.rho
    q = first_config.wm.q
    commit = code_commit()
    lines = []
    for stage, tokens in pooled.items():
        for line in table(tokens, rho, q):
            lines.append({"stage": stage, **line, "models": len(opened), "commit": commit})
    write(options.out, "noise", text=report(lines, rho, q), records=lines, figure=on_noise(lines))


def find_rule(name: str) -> Rule:
    """The rule of an environment, or the function FILE.py:FUNCTION.

    Raises UserError if there is none.
    """
    if name not in RULES and ":" not in name:
        raise UserError(
            f"no noise rule '{name}': there are {', '.join(RULES)}, or give --rule FILE.py:FUNCTION"
        )
    return RULES.get(name) or load("rules", name)


def noisy(tokens: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Whether each token (its characters [start, end)) overlaps a span; one such character makes it
    all a guess."""
    flags = []
    for token_start, token_end in tokens:
        flags.append(any(token_start < end and start < token_end for start, end in spans))
    return flags


def turns_of(groups: Sequence[Group]) -> list[Turn]:
    """All turns, in the order of `to_samples`."""
    turns: list[Turn] = []
    for group in groups:
        for episode in group.trajectories:
            turns += episode.turns
    return turns


def measure(
    path: str, config: Config, rule: Rule, tasks: int, rollouts: Path | None
) -> list[Token]:
    """Every observation token of the model's episodes, or of those in a file, at the temperature of
    training."""
    groups = []
    if not rollouts:
        with open_player(config, path) as player:
            groups, stats = player.training(0, tasks, EPISODES)
        report_failures(stats.failures)
    chat = Chat(load_tokenizer(path), config.model.chat_template_kwargs)
    device = pick_device(config.model.device)
    dtype = with_dtype(config, pick_dtype(device)).model.dtype
    policy = load_policy(path, dtype=dtype, device=device)
    if rollouts:
        groups = read_episodes(rollouts, vocabulary=len(policy.head_weight))

    max_tokens = config.wm.max_tokens
    encode = partial(chat.observation_ids, max_tokens=max_tokens)
    samples = to_samples(
        groups, separator_ids=chat.separator_ids, encode_observation=encode, invalid_penalty=0.0
    )
    turns = turns_of(groups)
    noise: list[list[bool]] = []  # of each sample's observation tokens
    for sample, turn in zip(samples, turns, strict=True):
        sample.wm_weight = 1.0
        observation = turn.outcome.observation
        token_spans = chat.observation_spans(observation, max_tokens)
        noise.append(noisy(token_spans, rule(turn.prompt, turn.outcome.action, observation)))

    batches = micro_batches(
        samples,
        Packing.of(config.optim, policy),
        with_observation=True,
        device=policy.device,
    )
    tokens = []
    with torch.no_grad():
        for batch in batches:
            flags: list[bool] = []
            for i in batch.indices:
                flags += noise[i]
            rated = policy(partial(p_and_spread, policy, batch, config.rollout.temperature))
            for flag, (p, spread) in zip(flags, rated, strict=True):
                tokens.append(Token(noise=flag, p=p, spread=spread))
    return tokens


def p_and_spread(policy: Any, batch: Any, temperature: float) -> list[tuple[float, float]]:
    """(p, ||e_y - softmax(z)||) of each observation token of a batch.

    Only inside a call of the policy.
    """
    pairs = []
    target = batch.target[batch.observation]
    hidden = policy.hidden(batch.input_ids, batch.lengths)[batch.position[batch.observation]]
    # Few rows of [V] at a time.
    for x, y in zip(hidden.split(256), target[:, None].split(256), strict=True):
        z = policy.transform(torch.nn.functional.linear(x, policy.head_weight, policy.head_bias))
        p = (z / temperature).softmax(-1)
        p_of_target = p.gather(1, y)
        spread = p.scatter_add(1, y, -torch.ones_like(p_of_target)).norm(dim=1)
        pairs += zip(p_of_target[:, 0].tolist(), spread.tolist(), strict=True)
    return pairs


def table(tokens: list[Token], rho: float, q: float) -> list[Record]:
    """A line for each class and loss: the class's size and its share of the gradient.

    Raises UserError if a class has no token.
    """
    lines = []
    for kind in ("noise", "rest"):
        members = [token for token in tokens if token.noise == (kind == "noise")]
        if not members:
            raise UserError(
                f"no token of class '{kind}' among {len(tokens)}: give more --tasks or another --rule"
            )
        mean_p = fmean(token.p for token in members)
        live = fmean(token.p <= rho for token in members)
        for loss, slope in SLOPES.items():
            line: Record = {
                "class": kind,
                "tokens": len(members),
                "token_share": len(members) / len(tokens),
                "mean_p": mean_p,
                "live": live,
                "loss": loss,
            }
            by_logp = sum(slope(token.p, rho, q) for token in members)
            by_logp_total = sum(slope(token.p, rho, q) for token in tokens)
            line["by_logp"] = by_logp / (by_logp_total or 1.0)

            by_logits = sum(slope(token.p, rho, q) * token.spread for token in members)
            by_logits_total = sum(slope(token.p, rho, q) * token.spread for token in tokens)
            line["by_logits"] = by_logits / (by_logits_total or 1.0)
            lines.append(line)
    return lines


def report(lines: list[Record], rho: float, q: float) -> str:
    """The classes, then the share of the gradient on noise."""
    classes = []
    shares = []
    for line in lines:
        if line["loss"] == "ce":  # the columns of a class are the same for every loss
            cells = [
                line["stage"],
                line["class"],
                line["tokens"],
                percent(line["token_share"]),
                f"{line['mean_p']:.3g}",
                percent(line["live"]),
            ]
            classes.append(cells)
        if line["class"] == "noise":
            by_logp = percent(line["by_logp"])
            by_logits = percent(line["by_logits"])
            shares.append([line["stage"], line["loss"], by_logp, by_logits, None])
    class_columns = ["model", "class", "tokens", "% of tokens", "mean p", f"% with p <= {rho:g}"]
    share_columns = ["model", "loss", "by dL/dlog p", "by dL/dlogits", "paper, WebShop"]
    return f"""{markdown(class_columns, classes)}

Per cent of the gradient on noise:

{markdown(share_columns, shares)}

gce with q = {q:g}. The paper: arXiv 2606.02388, Figure 2c; its values are in no public text we found."""


@styled
def on_noise(lines: Sequence[Record]) -> Figure:
    """Bars by stage: the share of tokens that are noise, then of each loss's gradient."""
    noise = [line for line in lines if line["class"] == "noise"]
    stages = list(dict.fromkeys(line["stage"] for line in noise))
    width = 0.8 / len(stages)
    figure = Figure((7.2, 2.9))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, label in zip(
        panels, ("by_logp", "by_logits"), ("dL / dlog p", "dL / dlogits"), strict=True
    ):
        for k, stage in enumerate(stages):
            of_stage = [line for line in noise if line["stage"] == stage]
            heights = [100 * of_stage[0]["token_share"]]
            heights += [100 * line[key] for line in of_stage]
            offset = (k - (len(stages) - 1) / 2) * width
            positions = [i + offset for i in range(len(heights))]
            bars = axes.bar(positions, heights, 0.9 * width, color=PALETTE[k], label=stage)
            axes.bar_label(bars, [f"{height:.0f}" for height in heights], padding=1, fontsize=8)
            axes.set_xticks(range(len(heights)), ["tokens", *(line["loss"] for line in of_stage)])
        axes.set_xlabel(f"by {label}")
    panels[0].set_ylabel("On noise (%)")
    legend(panels[0])
    return figure


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=(__doc__ or "").partition("\n")[0],
        epilog="any key of the configuration can be set: --rollout.tasks 4",
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="run directory (its start model too) or model")
    add("--recipe", help="environment and sampling (default: the run's own configuration)")
    add(
        "--tasks",
        type=int,
        default=16,
        help="training tasks to play in groups (default: %(default)s)",
    )
    add(
        "--rollouts", type=Path, metavar="FILE", help="episodes of `paw rollout` instead of playing"
    )
    add(
        "--rule",
        help="what is noise: alfworld, webshop or FILE.py:FUNCTION (default: by environment)",
    )
    add("--out", type=Path, default=Path("noise"), help="folder to write (default: %(default)s)")
    options, rest = parser.parse_known_args(words)
    try:
        pairs = zip(rest[::2], rest[1::2], strict=True)
        overrides = {key.removeprefix("--"): value for key, value in pairs}
        noise_gradient(options, overrides)
    except (UserError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
