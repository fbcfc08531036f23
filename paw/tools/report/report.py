"""`paw report`: an HTML page that shows what a run learnt and did, and at what cost.

Given several runs, it compares them. The page is self-contained: inline CSS and SVG, no script,
nothing fetched. A content security policy enforces this, because part of the text comes from
environments and models. The template, report.html.j2, escapes all text.
"""

import argparse
import difflib
import html
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from paw.errors import clean
from paw.io.files import write_file, writing
from paw.metric_list import METRICS, Metric
from paw.tools.report import plots
from paw.tools.report.rundir import Run, load_run

TAIL = 10
"""Number of updates averaged for the first and last columns of the table."""
PER_END = 3
"""Number of episodes shown of the first and of the last sampled update."""
EPISODE_CHARS = 100_000
"""Most characters of an episode's texts. This keeps the page small."""
TEXT_CHARS = 4_000
"""Most characters of one text."""
MAX_TOKENS = 600
"""Most shaded tokens per observation."""


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
    if not out:
        out = run_dirs[0]
        if len(runs) > 1:
            out = out.resolve().parent / "comparison"
    page = out / "report.html"
    with writing(f"the report to {out}", "; choose another folder with --out"):
        (out / "plots").mkdir(parents=True, exist_ok=True)
        write_file(page, _page(runs, out / "plots").encode(errors="replace"))
    return page


def _page(runs: Sequence[Run], plots_dir: Path) -> str:
    """Return the HTML of the page. Also saves the figures as PNG in `plots_dir`."""
    run = runs[0]
    single = len(runs) == 1
    title = run.name if single else f"{len(runs)} runs compared"
    has_world_model = run.config.get("wm.enabled", True)
    masks_tokens = has_world_model and run.config.get("wm.loss", "cmae") == "cmae"
    episodes = []
    if single:
        episodes = [shown_episode(sample) for sample in pick_episodes(run.samples)]

    folder = Path(__file__).parent
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
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
    return templates.get_template("report.html.j2").render(
        title=title,
        css=(folder / "report.css").read_text(encoding="utf-8"),
        run=run,
        runs=runs,
        single=single,
        colours=[plots.CSS_NAMES[colour] for colour in plots.PALETTE],
        facts=_facts(run),
        galleries=_galleries(runs, plots_dir),
        sections=SECTIONS,
        logged={key for run in runs for key in run.metrics},
        count=min(TAIL, max(run.updates for run in runs)),
        rho=run.config.get("wm.rho") if masks_tokens else None,
        episodes=episodes,
        differences=_differences(runs),
    )


def _printable(value: Any) -> Any:
    """Return text without control characters, which no page should show; None becomes "".

    HTML is left as it is.
    """
    if hasattr(value, "__html__"):
        return value
    return clean(value, 50 * TEXT_CHARS, lines=True)


Gallery = tuple[str, str, str, list[dict[str, Any]]]
"""A section of figures for the template: (title, lead, layout, figures)."""


def _galleries(runs: Sequence[Run], plots_dir: Path) -> Iterator[Gallery]:
    """Yield the sections of figures, one at a time.

    Every figure that has data is drawn, and also saved as PNG.
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
    yield "Task types", lead, "", _saved_figures(plots_dir, *_kind_curves(runs))

    for section, lead in LEADS.items():
        yield section, lead, "", _metric_figures(runs, section, plots_dir)


def _saved_figures(
    plots_dir: Path, *named_figures: tuple[str, str, Figure | None], aside: str = "", note: str = ""
) -> list[dict[str, Any]]:
    """Save the figures as PNG. Returns them for the template.

    Each is (file name, title, figure or None for no data).
    """
    saved = []
    for name, title, figure in named_figures:
        if not figure:
            continue
        svg = plots.to_svg(figure, name, html.escape(_printable(title)))
        figure.set_layout_engine("none")  # the SVG has laid it out, which is half the work
        save_png = partial(plots.styled(figure.savefig), dpi=150, facecolor="white")
        write_file(plots_dir / f"{name}.png", save_png)
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


def _metric_figures(runs: Sequence[Run], section: str, plots_dir: Path) -> list[dict[str, Any]]:
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
    parts = []
    estimator = run.config.get("advantage.type")
    if estimator:
        name = "GiGPO" if estimator == "gigpo" else str(estimator).upper()
        if run.config.get("wm.enabled"):
            parts.append(f"{name} + world-model co-training")
        else:
            parts.append(f"{name}, no world model")

    environment = run.config.get("env.name")
    if environment:
        games = "games"
        if not run.config.get("env.data"):
            games = f"generated games ({run.config.get('env.difficulty', 'full')})"
        parts.append(f"{environment}, {games}")

    model = run.info.get("model") or run.config.get("model.path")
    if model:
        size = _parameter_count(run.info.get("parameters"))
        parts.append(f"{model}, {size} parameters" if size else str(model))
    return " · ".join(parts)


def _parameter_count(count: object) -> str:
    """Write a parameter count as 1.54B; "" for anything but a positive integer."""
    if type(count) is not int:
        return ""
    for size, unit in SIZES:
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return ""


def _facts(run: Run) -> dict[str, str]:
    """Return the facts beside the headline, by label. Unknown ones are left out."""
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

    software = []
    for key, template in (
        ("torch", "PyTorch {}"),
        ("engine", "{} engine"),
        ("backend", "{} kernels"),
    ):
        if info.get(key):
            software.append(template.format(info[key]))

    health = []
    for metric in SECTIONS["Health"]:
        total = _total(run, metric) if metric.is_count else 0
        if total:
            health.append(f"{total:g} {metric.label.lower()}")

    damaged = ""
    if run.unreadable:
        damaged = f"{run.unreadable} unreadable line{'s' if run.unreadable > 1 else ''} left out"

    facts = {
        "Updates": updates,
        "Ended": _end(info),
        "Resumed": _times(info.get("resumed")),
        "Wall time": _duration(info.get("wall_s")),
        "Warm-up": _duration(info.get("warmup_s")),
        "Device": str(info.get("device") or ""),
        "Peak memory": "" if peak_gib is None else f"{peak_gib:.3g} GiB",
        "Throughput": throughput,
        "Software": ", ".join(software),
        "Games": str(info.get("games") or ""),
        "Started": str(info.get("started") or ""),
        "Health": ", ".join(health),
        "Damaged log": damaged,
    }
    return {label: value for label, value in facts.items() if value}


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


def pick_episodes(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return up to PER_END samples of the first sampled update, and as many of the last.

    They are from the same tasks if possible. The page opens with the first one of the last update,
    in which "open" is true.
    """
    complete = []
    for sample in samples:
        if type(sample.get("step")) is int and isinstance(sample.get("turns"), list):
            complete.append(sample)
    steps = sorted(sample["step"] for sample in complete)
    early = [sample for sample in complete if sample["step"] == steps[0]][:PER_END]
    late = [sample for sample in complete if sample["step"] == steps[-1] > steps[0]]

    early_tasks = {str(sample.get("task")) for sample in early}
    late.sort(key=lambda sample: str(sample.get("task")) not in early_tasks)
    late = late[:PER_END]
    open_index = len(early) if late else 0
    return [sample | {"open": i == open_index} for i, sample in enumerate(early + late)]


def shown_episode(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a line of samples.jsonl.

    Any part of the line may be missing or have another type.
    """
    turns = [turn for turn in sample["turns"] if isinstance(turn, dict)]
    shown_turns: list[dict[str, Any]] = []
    characters = 0
    for turn in turns:
        if characters > EPISODE_CHARS:
            break
        shown = _shown_turn(turn)
        shown_turns.append(shown)
        characters += sum(len(text) for text, _ in shown["tokens"]) + 50 * len(shown["tokens"])
        characters += sum(len(clip(shown[key])) for key in ("prompt", "response", "action"))

    total = sample["length"] if type(sample.get("length")) is int else len(turns)
    defaults = {"task": "", "kind": "", "won": None, "return": None}
    return defaults | sample | {"total": total, "turns": shown_turns}


def _shown_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn for the template: texts, observation in shaded tokens, and prediction."""
    shown: dict[str, Any] = {}
    for key in ("prompt", "action", "response", "observation"):
        shown[key] = str(turn.get(key) or "")
    for key in ("selected", "valid", "entropy"):
        shown[key] = turn.get(key)

    observation = shown["observation"]
    shown["tokens"] = list(
        _shaded(observation, turn.get("observation_tokens"), turn.get("observation_token_p"))
    )
    shown["predicted"] = None
    shown["exact"] = False
    prediction = turn.get("predicted")
    if prediction is not None:
        shown["predicted"] = list(_compared(str(prediction), observation))
        shown["exact"] = str(prediction).strip() == observation.strip()
    return shown


def _compared(predicted: str, observation: str) -> Iterator[tuple[str, bool]]:
    """Yield the greedy prediction in pieces: (text, whether the real observation differs)."""
    predicted_words = _words(predicted)
    matcher = difflib.SequenceMatcher(None, predicted_words, _words(observation), autojunk=False)
    for tag, low, high, _, _ in matcher.get_opcodes():
        if low < high:
            yield "".join(predicted_words[low:high]), tag != "equal"


def _words(text: str) -> list[str]:
    """Split a text into words and the spaces between them."""
    return re.findall(r"\s+|\S+", clip(text.strip()))


def _shaded(
    observation: str, tokens: Any, probabilities: Any
) -> Iterator[tuple[str, float | None]]:
    """Yield the observation in pieces: (text, its probability if it is a token that has one)."""
    end = 0  # end of the part of the observation that has been yielded
    if isinstance(tokens, list) and isinstance(probabilities, list):
        for token, probability in zip(tokens[:MAX_TOKENS], probabilities, strict=False):
            text = str(token).replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")
            if not observation.startswith(text, end):
                # Word-level tokens come without their spaces. Find the token nearby, and show the
                # space before it.
                text = text.strip() or text

            start = observation.find(text, end, end + len(text) + 16)
            if start >= 0:
                gap = observation[end:start]
                if gap.isspace():
                    yield gap, None
                end = start + len(text)

            is_probability = type(probability) in (int, float) and 0 <= probability <= 1
            yield text, probability if is_probability else None

    remainder = observation[end:]
    if remainder:
        yield clip(remainder), None


def clip(text: object) -> str:
    """Cut the text off after TEXT_CHARS."""
    text = str(text)
    if len(text) <= TEXT_CHARS:
        return text
    return text[:TEXT_CHARS] + " …"
