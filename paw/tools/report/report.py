"""`paw report`: an HTML page that shows what a run learnt and did, and at what cost.

Given several runs, it compares them. The page is self-contained: inline CSS, SVG and scripts,
nothing fetched. A content security policy enforces this, because part of the text comes from
environments and models: only the page's own scripts run, known by their digest. The template,
report.html.j2, escapes all text. `paw view` serves the same page while a run goes on, see `Live`.
"""

import argparse
import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from paw.errors import clean
from paw.io.files import write_file, writing
from paw.metric_list import METRICS, Metric
from paw.tools.report import plots
from paw.tools.report.episodes import PAGE_BYTES, EpisodeIndex, embedded
from paw.tools.report.rundir import Run, load_run

TAIL = 10
"""Number of updates averaged for the first and last columns of the table."""
TEXT_CHARS = 4_000
"""Maximum characters of one text."""
FOLDER = Path(__file__).parent
"""The template, styles and scripts of the page."""


def _metrics_of(section: str) -> list[Metric]:
    return [metric for metric in METRICS if metric.section == section]


SECTIONS = {
    "Policy": _metrics_of("Policy"),
    "World model": _metrics_of("World model"),
    "Critic": _metrics_of("Critic"),
    "Cost": _metrics_of("Cost"),
    "Health": _metrics_of("Health"),
}
"""Metrics in the page's table, by section."""
SIZES = ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))
"""Units of a number of parameters, the largest first."""
LEADS = {
    "Policy": "Moving means over the updates; thin lines, where shown, are the single updates.",
    "World model": (
        "Predicting the next observation, on the turns where the policy was least certain."
    ),
    "Cost": "Where the time went.",
}
"""The sections with charts, and the sentence above them."""


def run(options: argparse.Namespace, _: object) -> int:
    """Write the report, and print the path of its page."""
    print(write_report(*options.run_dir, out=options.out))
    return 0


def write_report(*run_dirs: Path, out: Path | None = None) -> Path:
    """Write report.html and plots/*.png into `out` and return the page's path.

    By default `out` is the run's own folder, or for several runs `comparison/` beside the first. A
    damaged line or a missing metric leaves a gap. Raises UserError if a run has no metrics or the
    folder is not writable.
    """
    runs = [load_run(path) for path in run_dirs]
    indices = [EpisodeIndex(path) for path in run_dirs]
    for index in indices:
        index.update()
    if not out:
        out = run_dirs[0]
        if len(runs) > 1:
            out = out.resolve().parent / "comparison"
    page = out / "report.html"
    with writing(f"the report to {out}", "; choose another folder with --out"):
        (out / "plots").mkdir(parents=True, exist_ok=True)
        text = render(runs, indices, plots_dir=out / "plots")
        write_file(page, text.encode(errors="replace"))
    return page


@dataclass(frozen=True)
class Live:
    """What a page that `paw view` serves needs to follow its runs."""

    urls: Sequence[str]
    """The path at which the page asks for each run's changes and episodes."""
    versions: Sequence[str]
    """The version of each run's metrics when the page was made."""


def render(
    runs: Sequence[Run],
    indices: Sequence[EpisodeIndex],
    *,
    plots_dir: Path | None = None,
    live: Live | None = None,
) -> str:
    """Return the HTML of the page.

    The figures are also saved as PNG in `plots_dir`, if given. A live page has no episodes in it,
    because it asks for them.
    """
    run = runs[0]
    single = len(runs) == 1
    title = run.name if single else f"{len(runs)} runs compared"
    scripts = [_text("episodes.js")]
    if live:
        scripts.append(_text("live.js"))

    return (
        _templates()
        .get_template("report.html.j2")
        .render(
            title=title,
            css=_text("report.css"),
            policy=_policy(scripts, live=live is not None),
            scripts=scripts,
            episode_data=_episode_data(runs, indices, live),
            is_live=live is not None,
            run=run,
            runs=runs,
            single=single,
            colours=[plots.CSS_NAMES[colour] for colour in plots.PALETTE],
            facts=_facts(run, damaged=run.unreadable + indices[0].damaged),
            galleries=_galleries(runs, plots_dir),
            sections=SECTIONS,
            logged={key for run in runs for key in run.metrics},
            count=min(TAIL, max(run.updates for run in runs)),
            differences=_differences(runs),
        )
    )


def render_list(entries: Sequence[tuple[str, str, float]], *, folder: str) -> str:
    """Return the HTML of a list of runs: (name, address, when it was last written to)."""
    rows: list[tuple[str, str, str]] = []
    for name, url, changed_at in entries:
        written = datetime.fromtimestamp(changed_at, UTC).isoformat(" ", "minutes")
        rows.append((name, url, written.replace("+00:00", " UTC")))
    return (
        _templates()
        .get_template("list.html.j2")
        .render(css=_text("report.css"), rows=rows, folder=folder)
    )


def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
    )
    templates.filters["value"] = _value
    templates.filters["duration"] = _duration
    templates.filters["summary_line"] = _summary_line
    templates.filters["clip"] = clip
    templates.filters["total"] = _total
    return templates


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str], *, live: bool) -> str:
    """Return the content security policy, which allows the page's own scripts by their digest."""
    digests = []
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        digests.append(f"'sha256-{digest}'")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    policy += f"script-src {' '.join(digests)}; base-uri 'none'; form-action 'none'"
    return f"{policy}; connect-src 'self'" if live else policy


def _episode_data(runs: Sequence[Run], indices: Sequence[EpisodeIndex], live: Live | None) -> str:
    """Return the data of the episodes' table as JSON that is safe inside a <script> element."""
    shown_runs: list[dict[str, Any]] = []
    for number, (run, index) in enumerate(zip(runs, indices, strict=True)):
        rows, details = ([], {}) if live else embedded(index, PAGE_BYTES // len(runs))
        shown_runs.append({
            "name": clean(run.name),
            "rho": _rho(run),
            "rows": rows,
            "details": details,
            "left_out": 0 if live else len(index.rows) - len(rows),
            "generation": index.generation,
            "url": live.urls[number] if live else "",
            "version": live.versions[number] if live else "",
        })  # fmt: skip
    data = {"live": live is not None, "runs": shown_runs}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _rho(run: Run) -> float | None:
    """Return the probability up to which the world-model loss acts on a token (CMAE), or None."""
    has_world_model = run.config.get("wm.enabled", True)
    if not has_world_model or run.config.get("wm.loss", "cmae") != "cmae":
        return None
    rho = run.config.get("wm.rho", 0.2)
    return rho if type(rho) in (int, float) else None


def _printable(value: Any) -> Any:
    """Return text without control characters, which no page should show; None becomes "".

    HTML is left as it is.
    """
    if hasattr(value, "__html__"):
        return value
    return clean(value, 50 * TEXT_CHARS, lines=True)


Gallery = tuple[str, str, str, list[dict[str, Any]]]
"""A section of figures for the template: (title, lead, layout, figures)."""


def _galleries(runs: Sequence[Run], plots_dir: Path | None) -> Iterator[Gallery]:
    """Yield the sections of figures, one at a time.

    Every figure that has data is drawn, and also saved as PNG if there is a folder for it.
    """
    single = len(runs) == 1

    learning = _saved_figures(
        plots_dir,
        ("learning_curve", "Success over training", plots.learning_curve(runs, (4.8, 3.04))),
        ("success_by_kind", "Success by task type", plots.success_by_kind(runs, (3.6, 3.4))),
        ("pass_at_k", "Success in k attempts (pass@k)", plots.pass_at_k(runs, (4.8, 3.04))),
    )
    yield "Learning", "", "pair-wide", learning

    lead = "Evaluations of each run."
    if single:
        lead = "Evaluations in blue, training games in orange."
    curves = [*_kind_curves(runs), *_attempt_curves(runs)]
    yield "Task types", lead, "", _saved_figures(plots_dir, *curves)

    for section, lead in LEADS.items():
        yield section, lead, "", _metric_figures(runs, section, plots_dir)


def _saved_figures(
    plots_dir: Path | None,
    *named_figures: tuple[str, str, Figure | None],
    aside: str = "",
    note: str = "",
) -> list[dict[str, Any]]:
    """Save the figures as PNG, if there is a folder. Returns them for the template.

    Each is (file name, title, figure or None for no data).
    """
    saved = []
    for name, title, figure in named_figures:
        if not figure:
            continue
        svg = plots.to_svg(figure, name, html.escape(_printable(title)))
        if plots_dir:
            write_file(plots_dir / f"{name}.png", partial(plots.save_png, figure))
        saved.append({"title": title, "svg": svg, "aside": aside, "note": note})
    return saved


def _kind_curves(runs: Sequence[Run]) -> list[tuple[str, str, Figure | None]]:
    """Return (file name, task type, curve) for task types with more than one evaluation."""
    curves = []
    kinds = dict.fromkeys(kind for run in runs for kind in run.kinds)
    for i, kind in enumerate(kinds):
        if not any(len(run.metrics.get(f"eval/success_{kind}", ())) > 1 for run in runs):
            continue
        slug = re.sub("[^a-z0-9]+", "_", kind.lower())[:28]
        curve = plots.learning_curve(runs, (3.7, 2.2), kind=kind)
        curves.append((f"success_{i}_{slug}", kind, curve))
    return curves


def _attempt_curves(runs: Sequence[Run]) -> list[tuple[str, str, Figure | None]]:
    """Return (file name, title, pass@k) of each of several environments."""
    curves: list[tuple[str, str, Figure | None]] = []
    for i, label in enumerate(dict.fromkeys(label for run in runs for label in run.labels)):
        curve = plots.pass_at_k(runs, (3.7, 2.2), env=label)
        curves.append((f"pass_at_k_{i}", f"{label}: pass@k", curve))
    return curves


def _metric_figures(
    runs: Sequence[Run], section: str, plots_dir: Path | None
) -> list[dict[str, Any]]:
    """Return the charts of a section of metrics, for a single run with first and last mean."""
    figures = []
    if section == "Cost":
        figures += _saved_figures(
            plots_dir, ("time", "Time by phase", plots.phase_times(runs, (3.7, 2.5)))
        )

    for metric in SECTIONS[section]:
        if not metric.chart:
            continue
        label = f"{metric.label} ({metric.unit})" if metric.unit else metric.label
        figure = plots.metric(runs, metric.name, label, (3.7, 2.3), percent=metric.unit == "%")
        ends = ""
        if len(runs) == 1:
            first = _value(runs[0].first(metric.name, TAIL), metric.unit)
            last = _value(runs[0].last(metric.name, TAIL), metric.unit)
            ends = f"{first} → {last}"
        name = metric.name.replace("/", "_")
        figures += _saved_figures(
            plots_dir, (name, metric.label, figure), aside=ends, note=metric.meaning
        )
    return figures


def _summary_line(run: Run) -> str:
    """Describe the run in one line: algorithm, environment, model."""
    facts = []
    estimator = run.config.get("advantage.type")
    if estimator:
        name = "GiGPO" if estimator == "gigpo" else str(estimator).upper()
        if run.config.get("wm.enabled"):
            facts.append(f"{name} + world-model co-training")
        else:
            facts.append(f"{name}, no world model")

    environment = run.config.get("env.name")
    if environment:
        games = "games"
        if not run.config.get("env.data"):
            games = f"generated games ({run.config.get('env.difficulty', 'full')})"
        facts.append(f"{environment}, {games}")

    if run.labels:
        facts.append(" + ".join(run.labels))

    model = run.info.get("model") or run.config.get("model.path")
    if model:
        parameters = _parameter_count(run.info.get("parameters"))
        facts.append(f"{model}, {parameters} parameters" if parameters else str(model))
    return " · ".join(facts)


def _parameter_count(count: object) -> str:
    """Write a parameter count as 1.54B; "" for anything but a positive integer."""
    if type(count) is not int:
        return ""
    for size, unit in SIZES:
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return ""


def _facts(run: Run, *, damaged: int) -> dict[str, str]:
    """Return the facts beside the headline, by label. Unknown ones are left out.

    `damaged` is the number of lines of its logs that cannot be read.
    """
    info = run.info
    updates = str(run.updates)
    planned = run.config.get("run.updates")
    if planned not in (None, run.updates):
        updates = f"{run.updates} of {planned} planned"

    peak_gib = max(run.series("perf/peak_gib")[1], default=None)
    tokens_per_s = run.last("perf/tokens_per_s", TAIL)
    throughput = ""
    if tokens_per_s is not None:
        throughput = f"{_value(tokens_per_s, '')} tokens/s at the end"

    damaged_text = ""
    if damaged:
        damaged_text = f"{damaged} unreadable line{'s' if damaged > 1 else ''} left out"

    facts = {
        "Updates": updates,
        "Ended": _end(info),
        "Resumed": _times(info.get("resumed")),
        "Wall time": _duration(info.get("wall_s")),
        "Warm-up": _duration(info.get("warmup_s")),
        "Device": str(info.get("device") or ""),
        "Peak memory": "" if peak_gib is None else f"{peak_gib:.3g} GiB",
        "Throughput": throughput,
        "Software": _software(info),
        "Games": str(info.get("games") or ""),
        "Started": str(info.get("started") or ""),
        "Health": _health(run),
        "Damaged log": damaged_text,
    }
    return {label: value for label, value in facts.items() if value}


def _software(info: dict[str, Any]) -> str:
    """Name what computed the run: PyTorch, the engine, the kernels."""
    software = []
    for key, template in (
        ("torch", "PyTorch {}"),
        ("engine", "{} engine"),
        ("backend", "{} kernels"),
    ):
        if info.get(key):
            software.append(template.format(info[key]))
    return ", ".join(software)


def _health(run: Run) -> str:
    """Count what went wrong: failed episodes, skipped updates and so on."""
    health = []
    for metric in SECTIONS["Health"]:
        event_count = _total(run, metric) if metric.is_count else 0
        if event_count:
            health.append(f"{event_count:g} {metric.label.lower()}")
    return ", ".join(health)


def _total(run: Run, metric: Metric) -> float:
    """Return the count over the whole run, for a metric that counts events."""
    values = run.metrics.get(metric.name, {}).values()
    if metric.unit == "count":
        return sum(values)
    return max(values, default=0)


def _end(info: dict[str, Any]) -> str:
    """Say how a run ended, from its run.json; "" if it is in progress or was killed."""
    ended = info.get("ended")
    if not isinstance(ended, dict):
        return ""
    outcome = clean(ended.get("how") or "")
    reason = clean(ended.get("why") or "")
    return f"{outcome}: {reason}" if reason else outcome


def _times(resumed: Any) -> str:
    """Say how often a run was resumed; "" if never."""
    if not isinstance(resumed, list) or not resumed:
        return ""
    return f"{len(resumed)} time{'s' if len(resumed) > 1 else ''}"


def _differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the configuration keys in which the runs differ, with the value of each run."""
    differences = {}
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [run.config.get(key, "–") for run in runs]
        if key != "run.name" and any(value != values[0] for value in values):
            differences[key] = values
    return differences


def _value(value: float | None, unit: str) -> str:
    """Write a metric's value as the page shows it, in per cent if its unit is "%"."""
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.1f}%"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1e-3:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:.2g}"


def _duration(seconds: object) -> str:
    """Write seconds as hours, minutes and seconds; "" for anything but a positive number."""
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        return ""
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {remaining_seconds} s"
    return f"{remaining_seconds} s"


def clip(text: object) -> str:
    """Cut the text off after TEXT_CHARS."""
    text = str(text)
    if len(text) <= TEXT_CHARS:
        return text
    return text[:TEXT_CHARS] + " …"
