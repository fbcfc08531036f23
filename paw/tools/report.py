"""`paw report`: one HTML page that says what a run learnt, at what cost, and shows what it did; or
compares several runs.

The page is self-contained (inline CSS and SVG, no script, nothing fetched) and a content security policy keeps it so,
since part of its text comes from environments and models. The figures are also saved as PNG.
"""

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paw.errors import UserError
from paw.files import cause, write_file
from paw.state.rundir import Run, load_run
from paw.tools.episodes import episode_html, esc, pick_episodes

if TYPE_CHECKING:
    from paw.run import Run as LiveRun

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
TAIL = 10
"""Updates averaged for the first and last columns of the table."""


class Metric(NamedTuple):
    key: str
    label: str
    unit: str = ""
    """`%`: a share, shown in per cent. `n`: a count of each update; `sum`: its sum so far. Anything else is a unit."""
    note: str = ""
    chart: bool = True


SECTIONS: dict[str, list[Metric]] = {
    "Policy": [
        Metric("reward/mean", "Mean return", note="Environment reward of a training episode, without penalties."),
        Metric("success/all", "Success in training", "%", chart=False),
        Metric("policy/entropy", "Policy entropy", "nats", "Per response token. Towards 0, exploration ends."),
        Metric("policy/kl", "KL to the start model", "nats", "k3 estimate per response token."),
        Metric("policy/clip_frac", "Clipped tokens", "%", "Share of response tokens outside the clip range."),
        Metric("optim/grad_norm", "Gradient norm", note="Mean over optimizer steps, before clipping."),
        Metric("health/groups_mixed", "Mixed groups", "%", "Groups with wins and losses: what the policy learns from."),
        Metric("health/valid_actions", "Valid actions", "%", chart=False),
        Metric("policy/loss", "Policy loss", chart=False),
        Metric("optim/lr", "Learning rate", chart=False),
    ],
    "World model": [
        Metric("wm/lambda", "Weight λ", note="Mean of 1 − return / R_max over groups: falls as tasks are solved."),
        Metric("wm/loss", "World-model loss", note="As it enters the objective, weights included."),
        Metric("wm/masked_frac", "Masked tokens", "%", "Observation tokens left out: predicted, p > ρ."),
        Metric("wm/selected_frac", "Turns selected by entropy", "%", chart=False),
    ],
    "Critic": [
        Metric("critic/loss", "Value loss"),
        Metric(
            "critic/explained_variance", "Explained variance", note="Of returns, by values; below 0 worse than none."
        ),
        Metric("critic/grad_norm", "Gradient norm of the critic", chart=False),
        Metric("critic/clip_frac", "Clipped values", "%", chart=False),
    ],
    "Cost": [
        Metric("perf/tokens_per_s", "Throughput", "tokens/s"),
        Metric("wm/live_frac", "Live rows f", "%", "Rows with a gradient; the head costs 1 + 2f passes."),
        Metric("perf/peak_gib", "Peak memory", "GiB", chart=False),
        Metric("time/rollout", "Rollout", "s", chart=False),
        Metric("time/score", "Scoring pass", "s", chart=False),
        Metric("time/update", "Update", "s", chart=False),
        Metric("time/sync", "Weight sync", "s", chart=False),
        Metric("time/eval", "Evaluation, when one ran", "s", chart=False),
    ],
    "Health": [
        Metric("health/env_failures", "Environment failures", "n", chart=False),
        Metric("eval/failures", "Environment failures in evaluation", "n", chart=False),
        Metric("health/groups_dropped", "Groups dropped", "n", chart=False),
        Metric("health/threads_lost", "Threads lost to environments that hang", "n", chart=False),
        Metric("optim/skipped", "Steps skipped, not finite", "sum", chart=False),
        Metric("health/sampler_mismatch", "Sampler mismatch, largest", "nats", chart=False),
        Metric("health/sampler_mismatch_mean", "Sampler mismatch, mean", "nats", chart=False),
    ],
}
LEADS = {
    "Policy": "Moving means over the updates; thin lines, where shown, are the single updates.",
    "World model": "Predicting the next observation, on the turns where the policy was least certain.",
    "Cost": "Where the time went.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="+", type=Path, help="folder of a run; several are compared on one page")
    default = "RUN_DIR; for several, comparison/ beside it"
    parser.add_argument("--out", type=Path, help=f"folder for report.html and plots/ (default: {default})")


def run(args: argparse.Namespace) -> int:
    print(write_report(*args.run_dir, out=args.out))
    return 0


class Report:
    """A callback that writes the report of a run that ended in order, or was told to stop."""

    def on_end(self, run: "LiveRun") -> None:
        if run.ranks.first and not run.failed:
            write_report(run.directory)


def write_report(*run_dirs: Path, out: Path | None = None) -> Path:
    """Write report.html and plots/*.png into `out` and return the page's path.

    `out` defaults to the run's own folder, or for several, which are compared, to `comparison/` beside the first. A
    damaged line or a missing metric leaves a gap in the page. Raises UserError for a run without metrics, or a folder
    not writable.
    """
    runs = [load_run(path) for path in run_dirs]
    out = out or (run_dirs[0].resolve().parent / "comparison" if len(runs) > 1 else run_dirs[0])
    page = out / "report.html"
    try:
        (out / "plots").mkdir(parents=True, exist_ok=True)
        write_file(page, _page(runs, out / "plots").encode(errors="replace"))
    except OSError as error:
        raise UserError(f"{out}: cannot write the report: {cause(error)}; choose another folder with --out") from None
    return page


def _page(runs: Sequence[Run], plots_dir: Path) -> str:
    run, single = runs[0], len(runs) == 1
    title = esc(run.name if single else f"{len(runs)} runs compared")
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    version = esc(run.info.get("paw", ""))
    lead = f'<p class="lead">{esc(_what(run))}</p>' if single else ""
    return "".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title} · PaW</title><style>{css}</style></head><body><main>",
        f'<header><p class="note">PaW {version} · run report</p><h1>{title}</h1>{lead}</header>',
        _hero(run) if single else _comparison(runs),
        _figures(runs, plots_dir),
        _numbers(runs),
        _episodes(run) + _config(run) if single else _differences(runs),
        "</main></body></html>\n",
    ])  # fmt: skip


def _section(title: str, lead: str, body: str) -> str:
    """A heading with the sentence under it, or nothing where there is nothing to show."""
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<h2>{title}</h2>{lead}{body}" if body else ""


def _table(head: Iterable[str], body: str) -> str:
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    table = f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="card scroll">{table}</div>' if body else ""


def _row(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _what(run: Run) -> str:
    """The run in one line: algorithm, environment, model."""
    config, info = run.config, run.info
    parts = []
    if estimator := config.get("advantage.estimator"):
        world = " + world-model co-training" if config.get("wm.enabled") else ", no world model"
        parts.append({"grpo": "GRPO", "rloo": "RLOO", "gigpo": "GiGPO"}.get(estimator, str(estimator)) + world)
    if environment := config.get("env.name"):
        where = "games" if config.get("env.data") else f"generated games ({config.get('env.difficulty', 'full')})"
        parts.append(f"{environment}, {where}")
    if model := info.get("model") or config.get("model.path"):
        count = info.get("parameters")
        parts.append(f"{model}, {_count(count)} parameters" if type(count) is int else str(model))
    return " · ".join(parts)


def _hero(run: Run) -> str:
    steps, values = run.series("eval/success")
    change = '<p class="lead">No evaluation was logged.</p>'
    if steps:
        ends = {"before": 0, "after": -1} if len(steps) > 1 else {"after": -1}
        parts = []
        for look, at in ends.items():
            when = f"after update {steps[at]}" if steps[at] else "before training"
            interval = f"<span>{_interval(run, steps[at])}<br>{when}</span>"
            parts.append(f'<div class="{look}"><b>{100 * values[at]:.1f}%</b>{interval}</div>')
        games, heat = run.last("eval/games"), run.config.get("eval.temperature")
        on = f"{games:g} unseen games" if games else "unseen games"
        warmth = f" at temperature {heat:g}" if type(heat) in (int, float) else ""
        points = f", {100 * (values[-1] - values[0]):+.1f} points" if len(steps) > 1 else ""
        scores = '<span class="arrow">→</span>'.join(parts)
        change = (
            f'<div class="change">{scores}</div><p class="lead">Success on {on}{warmth}{points}. '
            "In brackets the 95% Wilson interval of that one evaluation; other seeds may end elsewhere.</p>"
        )
    rows = "".join(f"<dt>{label}</dt><dd>{esc(value)}</dd>" for label, value in _facts(run).items())
    return f'<div class="hero card"><div>{change}</div><dl>{rows}</dl></div>'


def _interval(run: Run, step: int) -> str:
    low, high = run.at("eval/ci_low", step), run.at("eval/ci_high", step)
    return "" if low is None or high is None else f"[{100 * low:.1f}, {100 * high:.1f}]"


def _facts(run: Run) -> dict[str, str]:
    info, planned = run.info, run.config.get("run.updates")
    peak, speed = max(run.series("perf/peak_gib")[1], default=None), run.last("perf/tokens_per_s", TAIL)
    software = (("torch", "PyTorch {}"), ("engine", "{} engine"), ("backend", "{} kernels"))
    health = [(_total(run, m), m.label.lower()) for m in SECTIONS["Health"] if m.unit in ("n", "sum")]
    lines = f"{run.unreadable} unreadable line{'s' if run.unreadable > 1 else ''} left out"
    facts = {
        "Updates": f"{run.updates} of {planned} planned" if planned not in (None, run.updates) else str(run.updates),
        "Wall time": _duration(info.get("wall_s")),
        "Warm-up": _duration(info.get("warmup_s")),
        "Device": str(info.get("device") or ""),
        "Peak memory": "" if peak is None else f"{peak:.3g} GiB",
        "Throughput": "" if speed is None else f"{_value(speed, '')} tokens/s at the end",
        "Software": ", ".join(text.format(info[key]) for key, text in software if info.get(key)),
        "Games": str(info.get("games") or ""),
        "Started": str(info.get("started") or ""),
        "Health": ", ".join(f"{total:g} {label}" for total, label in health if total),
        "Damaged log": lines if run.unreadable else "",
    }
    return {label: value for label, value in facts.items() if value}


def _total(run: Run, metric: Metric) -> float:
    """A counter over the whole run."""
    values = run.series(metric.key)[1]
    return sum(values) if metric.unit == "n" else max(values, default=0)


def _comparison(runs: Sequence[Run]) -> str:
    from paw.tools.plots import CSS_NAMES, PALETTE

    rows = ""
    for colour, run in zip(cycle(PALETTE), runs, strict=False):
        steps, values = run.series("eval/success")
        rows += _row(
            f'<span class="key" style="background:var(--{CSS_NAMES[colour]})"></span>{esc(run.name)}<br>'
            f'<span class="note">{esc(_what(run))}</span>',
            f"{100 * values[0]:.1f}%" if len(steps) > 1 else "–",
            f"<b>{100 * values[-1]:.1f}%</b> {_interval(run, steps[-1])}" if steps else "–",
            str(run.updates),
            _duration(run.info.get("wall_s")) or "–",
        )
    note = "Success on each run's unseen games. The intervals cover the games drawn, not other training seeds."
    head = ("Run", "Start", "End [95% interval]", "Updates", "Wall time")
    return f'<p class="lead">{note}</p>{_table(head, rows)}'


def _figures(runs: Sequence[Run], plots_dir: Path) -> str:
    """Draw, save and inline every figure for which there is data."""
    from paw.tools import plots  # matplotlib takes a while to load, and `paw --help` does not need it

    def card(name: str, title: str, figure, *, aside: str = "", note: str = "", png=None) -> str:
        if figure is None:
            return ""
        svg = plots.to_svg(figure, name, title)
        write_file(plots_dir / f"{name}.png", partial((png or figure).savefig, dpi=150, facecolor="white"))
        foot = f"<p>{note}</p>" if note else ""
        return f'<figure class="card"><figcaption><h3>{title}</h3><span>{aside}</span></figcaption>{svg}{foot}</figure>'

    curve, large = plots.learning_curve(runs, (4.8, 3.04)), plots.learning_curve(runs, (6.4, 3.7))
    wide = card("learning_curve", "Success over training", curve, png=large)
    wide += card("success_by_kind", "Success by task type", plots.success_by_kind(runs, (3.6, 3.4)))
    page = _section("Learning", "", wide and f'<div class="grid pair-wide">{wide}</div>')
    kinds = ""
    for index, kind in enumerate(dict.fromkeys(kind for run in runs for kind in run.kinds)):
        name = f"success_{index}_{re.sub('[^a-z0-9]+', '_', kind.lower())[:28]}"
        if any(len(run.metrics.get(f"eval/success_{kind}", ())) > 1 for run in runs):
            kinds += card(name, esc(kind), plots.learning_curve(runs, (3.7, 2.2), kind=kind))
    lead = "Evaluations in blue, training games in orange." if len(runs) == 1 else "Evaluations of each run."
    page += _section("Task types", lead, kinds and f'<div class="grid">{kinds}</div>')
    for section, lead in LEADS.items():
        cards = card("time", "Time by phase", plots.phase_times(runs, (3.7, 2.5))) if section == "Cost" else ""
        for m in filter(lambda m: m.chart, SECTIONS[section]):
            unit = f" ({m.unit})" if m.unit else ""
            figure = plots.metric(runs, m.key, m.label + unit, (3.7, 2.3), percent=m.unit == "%")
            ends = (_value(mean(m.key, TAIL), m.unit) for mean in (runs[0].first, runs[0].last))
            aside = " → ".join(ends) if len(runs) == 1 else ""
            cards += card(m.key.replace("/", "_"), m.label, figure, aside=aside, note=m.note)
        page += _section(section, lead, cards and f'<div class="grid">{cards}</div>')
    return page


def _numbers(runs: Sequence[Run]) -> str:
    single = len(runs) == 1
    count = min(TAIL, max(run.updates for run in runs))
    columns = [(esc(run.name), run.last) for run in runs]
    if single:
        columns = [(f"First {count}", runs[0].first), (f"Last {count}", runs[0].last)]
    body = ""
    for section, metrics in SECTIONS.items():
        rows = ""
        for m in metrics:
            if not any(m.key in run.metrics for run in runs):
                continue
            if m.unit in ("n", "sum"):
                cells = [*([""] if single else []), *(f"{_total(run, m):g} in all" for run in runs)]
            else:
                cells = [_value(mean(m.key, count), m.unit) for _, mean in columns]
            unit = f", {m.unit}" if m.unit not in ("", "%", "n", "sum") else ""
            rows += _row(f"{m.label}{unit} <code>{m.key}</code>", *cells)
        if rows:
            body += f'<tr><th colspan="{1 + len(columns)}">{section}</th></tr>{rows}'
    lead = f"Means over {'the first and the last' if single else 'the last'} {count} values of each metric."
    return _section("Numbers", lead, _table(("Metric", *(name for name, _ in columns)), body))


def _episodes(run: Run) -> str:
    picked = pick_episodes(run.samples)
    if not picked:
        return ""
    masked = run.config.get("wm.enabled", True) and run.config.get("wm.loss", "cmae") == "cmae"
    rho = run.config.get("wm.rho") if masked else None
    scale = "".join(f'<i style="--q:{1 - p:.2f}">p {p:g}</i>' for p in (1.0, 0.75, 0.5, 0.25, 0.0))
    kept = "" if rho is None else f", underlined at p ≤ ρ = {rho:g}, where the world-model loss acts"
    lead = (
        "Sampled as training began and as it ended. Each token of a real observation is shaded by the probability the "
        f'model gave it, <span class="scale">{scale}</span>{kept}. Beside it is what the model itself '
        "would have predicted, <mark>wavy</mark> where it differs."
    )
    first_late = [sample["step"] for sample in picked].index(picked[-1]["step"])
    body = "".join(episode_html(s, rho=rho, is_open=i == first_late) for i, s in enumerate(picked))
    return _section("Episodes", lead, body)


def _config(run: Run) -> str:
    text = f"<summary>config.toml</summary><pre>{esc(run.config_text)}</pre>"
    return _section("Configuration", "", run.config_text and f'<details class="card config">{text}</details>')


def _differences(runs: Sequence[Run]) -> str:
    rows = ""
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [run.config.get(key, "–") for run in runs]
        if any(value != values[0] for value in values) and key != "run.name":
            rows += _row(f"<code>{esc(key)}</code>", *map(esc, values))
    lead = "Where the runs differ." if rows else "The same in all."
    return f'<h2>Configuration</h2><p class="lead">{lead}</p>' + _table(("Key", *(esc(run.name) for run in runs)), rows)


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.1f}%"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 1e-3 else f"{value:.2g}"


def _count(value: int) -> str:
    for size, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.3g}{name}"
    return str(value)


def _duration(seconds: object) -> str:
    """Empty for anything but a positive number."""
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
