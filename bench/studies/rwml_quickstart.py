"""RWML in miniature, stage 1: how well next states are predicted, and games played, before and after.

    python bench/studies/rwml_quickstart.py [--folder runs/rwml]

Writes bench/results/rwml_quickstart.csv and rwml_filter.txt, the output of the filter of easy
triplets. All models come from one warmed-up quickstart model: `start`, fine-tuned on a tenth of its
triplets (it has not predicted next states before); `rwml`, GRPO on next states from there;
`wm-sft`, the baseline, fine-tuned on all training triplets. What the folder already holds is not
made again.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, evaluate, flags, paw, write

RECIPE = ("--recipe", "rwml-quickstart")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "rwml")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    triplets = folder / "triplets.jsonl"
    model = Path(paw("warmup", "quickstart-long").strip())
    make_models(folder, model, triplets)

    filter_output = (folder / "kept.log").read_text()
    filter_output = filter_output.replace(f": {folder / 'kept.jsonl'}", "")
    (RESULTS / "rwml_filter.txt").write_text(filter_output)

    info = json.loads((folder / "run" / "run.json").read_text())
    versions = {key: info[key] for key in ("paw", "torch", "device")}
    models = {
        "warm-up": model,
        "start": folder / "start",
        "rwml": folder / "run" / "hf",
        "wm-sft": folder / "wm-sft",
    }
    rows = []
    for name, path in models.items():
        next_state = evaluate(path, *RECIPE, "--env.triplets", triplets, "--eval.games", 0)
        task = evaluate(path, "--recipe", "quickstart")
        row = {"model": name, **columns("next_state", next_state), **columns("task", task)}
        rows.append(row | versions)
    write(RESULTS / "rwml_quickstart.csv", rows)


def make_models(folder: Path, model: Path, triplets: Path) -> None:
    """Collects triplets with the warmed-up model, and makes the other models from them."""
    kept = folder / "kept.jsonl"
    start = folder / "start"
    learner = ("--model", model, *RECIPE)
    games = ("--recipe", "quickstart", "--tasks", 200, "--rwml.dedup", "true")
    commands: dict[Path, tuple[object, ...]] = {
        triplets: ("collect", model, *games),
        start: ("sft", triplets, *learner, "--share", 0.1),
        kept: ("filter", triplets, *learner),
        folder / "wm-sft": ("sft", triplets, *learner, "--rwml.sft_epochs", 2),
    }
    for target, words in commands.items():
        if not target.exists():
            (folder / f"{target.stem}.log").write_text(paw("rwml", *words, "--out", target))
    if not (folder / "run" / "report.html").exists():
        settings = {
            "env.triplets": kept,
            "model.path": start,
            "run.dir": folder,
            "run.name": "run",
            "eval.games": 0,
        }
        paw("train", "rwml-quickstart", *flags(settings))


def columns(kind: str, evaluation: dict[str, float]) -> dict[str, float]:
    """Success and its interval, as columns of that kind."""
    return {f"{kind}_{key}": evaluation[key] for key in ("success", "ci_low", "ci_high", "games")}


if __name__ == "__main__":
    main()
