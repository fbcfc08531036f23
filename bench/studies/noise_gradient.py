"""The share of the world model's gradient on tokens that nobody can predict (Figure 2c and A.4 of the paper).

    python bench/studies/noise_gradient.py runs/quickstart --tasks 16

The paper (arXiv 2606.02388) compares cross-entropy with MAE on WebShop, before the mask. Let p be
the probability of an observation token y, e_y its one-hot vector and z the logits. Then each loss
has

    |dL/dlog p| = g,    ||dL/dz|| = g ||e_y - softmax(z)||,    g = 1 (ce), p^q (gce), p (mae), p [p <= rho] (cmae)

Both are summed over tokens of equal weight, leaving out 1/|o|, lambda and the selection by entropy.
No public text that we found says which of the two the figure shows, what its values are, or what
the exact rules of A.4 are. Writes noise.csv, noise.md and noise.png.
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
import torch.nn.functional as F
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
    """What lies in a place: the list after "you see", unless the prompt already shows the place
    with the same list."""
    return [match.span(1) for match in LISTED.finditer(observation) if match[0] not in prompt]


def webshop(prompt: str, action: str, observation: str) -> list[tuple[int, int]]:
    """ASIN codes, and product titles with their brands.

    A title follows a code (on a page of results) or precedes a price (on a product's page).
    """
    spans = [match.span() for match in ASIN.finditer(observation)]
    segments = observation.split(SEPARATOR)
    segment_start = 0
    for previous, segment, following in zip(
        ["", *segments], segments, [*segments[1:], ""], strict=False
    ):
        follows_code = ASIN.fullmatch(previous.strip("'"))
        precedes_price = following.strip("'").lower().startswith("price:")
        if follows_code or precedes_price:
            spans.append((segment_start, segment_start + len(segment)))
        segment_start += len(segment) + len(SEPARATOR)
    return sorted(spans)


RULES: dict[str, Rule] = {"alfworld": household, "webshop": webshop}
"""Environment -> its rule."""


def noise_gradient(options: argparse.Namespace, overrides: dict[str, str]) -> None:
    """Measure the models, pooled by stage. Write noise.csv, noise.md and noise.png, and print the
    table."""
    if options.tasks < 1:
        raise UserError(f"--tasks {options.tasks}: play at least 1")
    if options.rollouts and len(options.models) > 1:
        raise UserError("--rollouts holds the tokens of one model: give one MODEL")
    opened = [(Path(model), *resolve(model, options.recipe, overrides)) for model in options.models]
    rules = [find_rule(options.rule or config.env.name) for _, config, _ in opened]
    pooled: dict[str, list[Token]] = {}
    for (model, config, weights_path), rule in zip(opened, rules, strict=True):
        is_run = (model / "config.toml").is_file()
        stages = {"model": weights_path}
        if is_run:
            stages = {"start": start_model(model, config), "trained": weights_path}
        for stage, weights in stages.items():
            to_stderr(f"{stage}: {weights}")
            tokens = measure(weights, config, rule, options.tasks, options.rollouts)
            pooled.setdefault(stage, []).extend(tokens)

    _, first_config, _ = opened[0]
    rho = first_config.wm.rho
    q = first_config.wm.q
    commit = code_commit()
    records = []
    for stage, tokens in pooled.items():
        for record in table(tokens, rho, q):
            records.append({"stage": stage, **record, "models": len(opened), "commit": commit})
    write(
        options.out,
        "noise",
        text=report(records, rho, q),
        records=records,
        figure=on_noise(records),
    )


def find_rule(name: str) -> Rule:
    """The rule of an environment, or the function named by FILE.py:FUNCTION.

    Raises UserError if there is no such rule.
    """
    if name not in RULES and ":" not in name:
        raise UserError(
            f"no noise rule '{name}': there are {', '.join(RULES)}, or give --rule FILE.py:FUNCTION"
        )
    return RULES.get(name) or load("rules", name)


def noisy(tokens: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Whether each token, given as its characters [start, end), overlaps a span.

    A single noisy character makes the whole token a guess.
    """
    is_noise = []
    for token_start, token_end in tokens:
        is_noise.append(any(token_start < end and start < token_end for start, end in spans))
    return is_noise


def turns_of(groups: Sequence[Group]) -> list[Turn]:
    """All turns of the groups, in the order of `to_samples`."""
    turns: list[Turn] = []
    for group in groups:
        for episode in group.trajectories:
            turns += episode.turns
    return turns


def measure(
    path: str, config: Config, rule: Rule, tasks: int, rollouts: Path | None
) -> list[Token]:
    """Every observation token of the model's episodes, or of the episodes in a file, rated at the
    training temperature."""
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

    Must run inside a call of the policy.
    """
    pairs = []
    target = batch.target[batch.observation]
    hidden = policy.hidden(batch.input_ids, batch.lengths)[batch.position[batch.observation]]
    # A few rows of [V] at a time.
    for hidden_rows, target_rows in zip(hidden.split(256), target[:, None].split(256), strict=True):
        products = F.linear(hidden_rows, policy.head_weight, policy.head_bias)
        logits = policy.transform(products)
        probabilities = (logits / temperature).softmax(-1)
        p_of_target = probabilities.gather(1, target_rows)
        minus_one = -torch.ones_like(p_of_target)
        spread = probabilities.scatter_add(1, target_rows, minus_one).norm(dim=1)
        pairs += zip(p_of_target[:, 0].tolist(), spread.tolist(), strict=True)
    return pairs


def table(tokens: list[Token], rho: float, q: float) -> list[Record]:
    """A record for each class and loss: the size of the class and its share of the gradient.

    Raises UserError if a class has no token.
    """
    records = []
    for token_class in ("noise", "rest"):
        members = [token for token in tokens if token.noise == (token_class == "noise")]
        if not members:
            raise UserError(
                f"no token of class '{token_class}' among {len(tokens)}: give more --tasks or another --rule"
            )
        mean_p = fmean(token.p for token in members)
        live_share = fmean(token.p <= rho for token in members)
        for loss, slope in SLOPES.items():
            record: Record = {
                "class": token_class,
                "tokens": len(members),
                "token_share": len(members) / len(tokens),
                "mean_p": mean_p,
                "live": live_share,
                "loss": loss,
            }
            by_logp = sum(slope(token.p, rho, q) for token in members)
            by_logp_total = sum(slope(token.p, rho, q) for token in tokens)
            record["by_logp"] = by_logp / (by_logp_total or 1.0)

            by_logits = sum(slope(token.p, rho, q) * token.spread for token in members)
            by_logits_total = sum(slope(token.p, rho, q) * token.spread for token in tokens)
            record["by_logits"] = by_logits / (by_logits_total or 1.0)
            records.append(record)
    return records


def report(records: list[Record], rho: float, q: float) -> str:
    """The classes, then the share of the gradient on noise."""
    classes = []
    shares = []
    for record in records:
        if record["loss"] == "ce":  # the columns of a class are the same for every loss
            cells = [
                record["stage"],
                record["class"],
                record["tokens"],
                percent(record["token_share"]),
                f"{record['mean_p']:.3g}",
                percent(record["live"]),
            ]
            classes.append(cells)
        if record["class"] == "noise":
            by_logp = percent(record["by_logp"])
            by_logits = percent(record["by_logits"])
            shares.append([record["stage"], record["loss"], by_logp, by_logits, None])
    class_columns = ["model", "class", "tokens", "% of tokens", "mean p", f"% with p <= {rho:g}"]
    share_columns = ["model", "loss", "by dL/dlog p", "by dL/dlogits", "paper, WebShop"]
    return f"""{markdown(class_columns, classes)}

Per cent of the gradient on noise:

{markdown(share_columns, shares)}

gce with q = {q:g}. The paper: arXiv 2606.02388, Figure 2c; its values are in no public text we found."""


@styled
def on_noise(records: Sequence[Record]) -> Figure:
    """Bars by stage: noise's share of the tokens, then of each loss's gradient."""
    noise_records = [record for record in records if record["class"] == "noise"]
    stages = list(dict.fromkeys(record["stage"] for record in noise_records))
    width = 0.8 / len(stages)
    figure = Figure((7.2, 2.9))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, label in zip(
        panels, ("by_logp", "by_logits"), ("dL / dlog p", "dL / dlogits"), strict=True
    ):
        for stage_index, stage in enumerate(stages):
            of_stage = [record for record in noise_records if record["stage"] == stage]
            heights = [100 * of_stage[0]["token_share"]]
            heights += [100 * record[key] for record in of_stage]
            offset = (stage_index - (len(stages) - 1) / 2) * width
            positions = [position + offset for position in range(len(heights))]
            bars = axes.bar(
                positions, heights, 0.9 * width, color=PALETTE[stage_index], label=stage
            )
            axes.bar_label(bars, [f"{height:.0f}" for height in heights], padding=1, fontsize=8)
            labels = ["tokens", *(record["loss"] for record in of_stage)]
            axes.set_xticks(range(len(heights)), labels)
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
    add(
        "models",
        nargs="+",
        metavar="MODEL",
        help="run directory (its start model is measured too) or model",
    )
    add("--recipe", help="environment and sampling (default: the run's own configuration)")
    add(
        "--tasks",
        type=int,
        default=16,
        help="training tasks to play in groups (default: %(default)s)",
    )
    add(
        "--rollouts",
        type=Path,
        metavar="FILE",
        help="episodes of `paw rollout`, instead of playing",
    )
    add(
        "--rule",
        help="what is noise: alfworld, webshop or FILE.py:FUNCTION (default: by environment)",
    )
    add("--out", type=Path, default=Path("noise"), help="folder to write (default: %(default)s)")
    options, key_words = parser.parse_known_args(words)
    try:
        key_pairs = zip(key_words[::2], key_words[1::2], strict=True)
        overrides = {key.removeprefix("--"): value for key, value in key_pairs}
        noise_gradient(options, overrides)
    except (UserError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
