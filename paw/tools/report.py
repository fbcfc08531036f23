"""`paw report`: one HTML page that shows what a run learnt, at what cost, and what it did; or compares several runs.

The page is self-contained (inline CSS and SVG, no script, nothing fetched) and a content security policy keeps it so:
part of its text comes from environments and models. Its template, report.html.j2, escapes all text.
"""

import argparse
import difflib
import html
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from paw.errors import clean
from paw.files import write_file, writing
from paw.tools import plots
from paw.tools.rundir import Run, load_run

TAIL = 10
"""Updates averaged for the first and last columns of the table."""
PER_END = 3
"""Episodes shown of the first and of the last sampled update."""
EPISODE_CHARS, TEXT_CHARS, MAX_TOKENS = 100_000, 4_000, 600
"""Of the texts of an episode, of one text, and tokens of an observation that are shaded: the page stays small."""


class Metric(NamedTuple):
    key: str
    label: str
    unit: str = ""
    """`%`: a share, shown in per cent. `n`: a count of each update; `sum`: its sum so far. Anything else is a unit."""
    note: str = ""
    chart: bool = True

    @property
    def counts(self) -> bool:
        return self.unit in ("n", "sum")

    def total(self, run: Run) -> float:
        """A count over the whole run."""
        values = run.metrics.get(self.key, {}).values()
        return sum(values) if self.unit == "n" else max(values, default=0)


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
        Metric("critic/explained_variance", "Explained variance", note="Of the returns, by the values."),
        Metric("critic/grad_norm", "Gradient norm of the critic", chart=False),
        Metric("critic/clip_frac", "Clipped values", "%", chart=False),
    ],
    "Cost": [
        Metric("perf/tokens_per_s", "Throughput", "tokens/s"),
        Metric("optim/gradient_frac", "Tokens with a gradient, f", "%", "The head costs 1 + 2f passes."),
        Metric("perf/peak_gib", "Peak memory", "GiB", chart=False),
        Metric("time/rollout", "Rollout", "s", chart=False),
        Metric("time/score", "Scoring pass", "s", chart=False),
        Metric("time/update", "Update", "s", chart=False),
        Metric("time/sync", "Weight sync", "s", chart=False),
        Metric("time/eval", "Evaluation, when one ran", "s", chart=False),
        Metric("time/save", "Training waited for a checkpoint", "s", chart=False),
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
SIZES = ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))
LEADS = {
    "Policy": "Moving means over the updates; thin lines, where shown, are the single updates.",
    "World model": "Predicting the next observation, on the turns where the policy was least certain.",
    "Cost": "Where the time went.",
}


def run(args: argparse.Namespace, _: object) -> int:
    print(write_report(*args.run_dir, out=args.out))
    return 0


def write_report(*run_dirs: Path, out: Path | None = None) -> Path:
    """Write report.html and plots/*.png into `out` and return the page's path.

    `out` is the run's own folder, or for several `comparison/` beside the first. A damaged line or a missing metric
    leaves a gap. UserError for a run without metrics, or a folder not writable.
    """
    runs = [load_run(path) for path in run_dirs]
    out = out or (run_dirs[0].resolve().parent / "comparison" if len(runs) > 1 else run_dirs[0])
    page = out / "report.html"
    with writing(f"the report to {out}", "; choose another folder with --out"):
        (out / "plots").mkdir(parents=True, exist_ok=True)
        write_file(page, _page(runs, out / "plots").encode(errors="replace"))
    return page


def _page(runs: Sequence[Run], plots_dir: Path) -> str:
    folder, run, single = Path(__file__).parent, runs[0], len(runs) == 1
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, finalize=_printable,
    )  # fmt: skip
    pages.filters |= {"value": _value, "duration": _duration, "what": _what, "clip": clip}
    masked = run.config.get("wm.enabled", True) and run.config.get("wm.loss", "cmae") == "cmae"
    return pages.get_template("report.html.j2").render(
        title=run.name if single else f"{len(runs)} runs compared",
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
        rho=run.config.get("wm.rho") if masked else None,
        episodes=[shown_episode(sample) for sample in pick_episodes(run.samples)] if single else [],
        differences=_differences(runs),
    )


def _printable(value: Any) -> Any:
    """Text without the control characters that no page should show; None as nothing."""
    return value if hasattr(value, "__html__") else clean(value, 50 * TEXT_CHARS, lines=True)


def _galleries(runs: Sequence[Run], plots_dir: Path) -> Iterator[tuple[str, str, str, list[dict[str, Any]]]]:
    """(title, lead, layout, figures) of each section; every figure for which there is data is drawn and saved."""
    single = len(runs) == 1

    def figures(*given: tuple[str, str, Any], aside: str = "", note: str = "") -> list[dict[str, Any]]:
        """Of (file name, title, figure or None)."""
        found = []
        for name, title, figure in filter(lambda one: one[2], given):
            svg = plots.to_svg(figure, name, html.escape(_printable(title)))
            figure.set_layout_engine("none")  # laid out, which is half the work
            write_file(plots_dir / f"{name}.png", partial(plots.styled(figure.savefig), dpi=150, facecolor="white"))
            found.append({"title": title, "svg": svg, "aside": aside, "note": note})
        return found

    curve = ("learning_curve", "Success over training", plots.learning_curve(runs, (4.8, 3.04)))
    bars = ("success_by_kind", "Success by task type", plots.success_by_kind(runs, (3.6, 3.4)))
    yield "Learning", "", "pair-wide", figures(curve, bars)
    kinds = [
        (f"success_{i}_{re.sub('[^a-z0-9]+', '_', kind.lower())[:28]}", kind,
         plots.learning_curve(runs, (3.7, 2.2), kind=kind))
        for i, kind in enumerate(dict.fromkeys(kind for run in runs for kind in run.kinds))
        if any(len(run.metrics.get(f"eval/success_{kind}", ())) > 1 for run in runs)
    ]  # fmt: skip
    lead = "Evaluations in blue, training games in orange." if single else "Evaluations of each run."
    yield "Task types", lead, "", figures(*kinds)
    for section, lead in LEADS.items():
        times = plots.phase_times(runs, (3.7, 2.5)) if section == "Cost" else None
        found = figures(("time", "Time by phase", times))
        for m in filter(lambda m: m.chart, SECTIONS[section]):
            label = m.label + (f" ({m.unit})" if m.unit else "")
            figure = plots.metric(runs, m.key, label, (3.7, 2.3), percent=m.unit == "%")
            ends = " → ".join(_value(mean(m.key, TAIL), m.unit) for mean in (runs[0].first, runs[0].last))
            found += figures((m.key.replace("/", "_"), m.label, figure), aside=ends if single else "", note=m.note)
        yield section, lead, "", found


def _what(run: Run) -> str:
    """The run in one line: algorithm, environment, model."""
    config, info = run.config, run.info
    parts = []
    if estimator := config.get("advantage.type"):
        world = " + world-model co-training" if config.get("wm.enabled") else ", no world model"
        parts.append({"gigpo": "GiGPO"}.get(estimator, str(estimator).upper()) + world)
    if environment := config.get("env.name"):
        where = "games" if config.get("env.data") else f"generated games ({config.get('env.difficulty', 'full')})"
        parts.append(f"{environment}, {where}")
    if model := info.get("model") or config.get("model.path"):
        count = info.get("parameters")
        named = [f"{count / size:.3g}{name}" for size, name in SIZES if type(count) is int and count >= size]
        parts.append(f"{model}, {named[0]} parameters" if named else str(model))
    return " · ".join(parts)


def _facts(run: Run) -> dict[str, str]:
    info, planned = run.info, run.config.get("run.updates")
    peak, speed = max(run.series("perf/peak_gib")[1], default=None), run.last("perf/tokens_per_s", TAIL)
    software = {"torch": "PyTorch {}", "engine": "{} engine", "backend": "{} kernels"}
    health = [(metric.total(run), metric.label.lower()) for metric in SECTIONS["Health"] if metric.counts]
    lines = f"{run.unreadable} unreadable line{'s' if run.unreadable > 1 else ''} left out"
    facts = {
        "Updates": f"{run.updates} of {planned} planned" if planned not in (None, run.updates) else str(run.updates),
        "Wall time": _duration(info.get("wall_s")),
        "Warm-up": _duration(info.get("warmup_s")),
        "Device": str(info.get("device") or ""),
        "Peak memory": "" if peak is None else f"{peak:.3g} GiB",
        "Throughput": "" if speed is None else f"{_value(speed, '')} tokens/s at the end",
        "Software": ", ".join(text.format(info[key]) for key, text in software.items() if info.get(key)),
        "Games": str(info.get("games") or ""),
        "Started": str(info.get("started") or ""),
        "Health": ", ".join(f"{total:g} {label}" for total, label in health if total),
        "Damaged log": lines if run.unreadable else "",
    }
    return {label: value for label, value in facts.items() if value}


def _differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Keys of the configuration in which the runs differ, with each one's value."""
    values = {key: [run.config.get(key, "–") for run in runs] for run in runs for key in run.config}
    return {key: found for key, found in values.items() if key != "run.name" and any(v != found[0] for v in found)}


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.1f}%"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 1e-3 else f"{value:.2g}"


def _duration(seconds: object) -> str:
    """Empty for anything but a positive number."""
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def pick_episodes(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Up to PER_END of the first sampled update and of the last, of the same tasks; the first of the last is "open"."""
    samples = [s for s in samples if type(s.get("step")) is int and isinstance(s.get("turns"), list)]
    steps = sorted(s["step"] for s in samples)
    early = [s for s in samples if s["step"] == steps[0]][:PER_END]
    late = [s for s in samples if s["step"] == steps[-1] > steps[0]]
    tasks = {str(s.get("task")) for s in early}
    picked = early + sorted(late, key=lambda s: str(s.get("task")) not in tasks)[:PER_END]
    return [s | {"open": i == (len(early) if late else 0)} for i, s in enumerate(picked)]


def shown_episode(sample: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a record of samples.jsonl, anything of which may be missing or of another type."""
    turns = [turn for turn in sample["turns"] if isinstance(turn, dict)]
    shown, size = [], 0
    while len(shown) < len(turns) and size <= EPISODE_CHARS:
        shown.append(_turn(turns[len(shown)]))
        size += sum(len(text) for text, _ in shown[-1]["tokens"]) + 50 * len(shown[-1]["tokens"])
        size += sum(len(clip(shown[-1][key])) for key in ("prompt", "response", "action"))
    total = sample["length"] if type(sample.get("length")) is int else len(turns)
    return {"task": "", "kind": "", "won": None, "return": None} | sample | {"total": total, "turns": shown}


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    texts = {key: str(turn.get(key) or "") for key in ("prompt", "action", "response", "observation")}
    guess, real = turn.get("predicted"), texts["observation"]
    tokens = _shaded(real, turn.get("observation_tokens"), turn.get("observation_token_p"))
    return texts | {key: turn.get(key) for key in ("selected", "valid", "entropy")} | {
        "tokens": list(tokens),
        "predicted": None if guess is None else list(_compared(str(guess), real)),
        "exact": guess is not None and str(guess).strip() == real.strip(),
    }  # fmt: skip


def _compared(predicted: str, observation: str) -> Iterator[tuple[str, bool]]:
    """The model's greedy guess in pieces: (text, whether it differs from the real one)."""
    words, real = (re.findall(r"\s+|\S+", clip(text.strip())) for text in (predicted, observation))
    for tag, low, high, _, _ in difflib.SequenceMatcher(None, words, real, autojunk=False).get_opcodes():
        if low < high:
            yield "".join(words[low:high]), tag != "equal"


def _shaded(observation: str, tokens: Any, probabilities: Any) -> Iterator[tuple[str, float | None]]:
    """The observation in pieces: (text, its probability where it is a token that has one)."""
    at = 0
    if isinstance(tokens, list) and isinstance(probabilities, list):
        for token, p in zip(tokens[:MAX_TOKENS], probabilities, strict=False):
            text = str(token).replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")
            if not observation.startswith(text, at):
                # Word-level tokens come without their spaces: find the token nearby, and show the space before it.
                text = text.strip() or text
            found = observation.find(text, at, at + len(text) + 16)
            if found >= 0:
                if (gap := observation[at:found]).isspace():
                    yield gap, None
                at = found + len(text)
            known = type(p) in (int, float) and 0 <= p <= 1
            yield text, p if known else None
    if observation[at:]:
        yield clip(observation[at:]), None


def clip(text: object) -> str:
    text = str(text)
    return text if len(text) <= TEXT_CHARS else text[:TEXT_CHARS] + " …"
