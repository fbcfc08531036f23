"""RWML in miniature, stage 1: how well next states are predicted and games played, before and after.

    python bench/studies/rwml_quickstart.py [--folder runs/rwml]

Writes bench/results/rwml_quickstart.csv, and rwml_filter.txt with the output of the filter of easy
triplets. All models come from one warmed-up quickstart model, which has never predicted next
states: `start` is fine-tuned on a tenth of its triplets, `rwml` is `start` after GRPO on next
states, and the baseline `wm-sft` is fine-tuned on all training triplets. Whatever the folder
already contains is not made again.
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
    warm_model = Path(paw("warmup", "quickstart-long").strip())
    make_models(folder, warm_model, triplets)

    filter_output = (folder / "kept.log").read_text()
    filter_output = filter_output.replace(f": {folder / 'kept.jsonl'}", "")
    (RESULTS / "rwml_filter.txt").write_text(filter_output)

    info = json.loads((folder / "run" / "run.json").read_text())
    versions = {column: info[column] for column in ("paw", "torch", "device")}
    models = {
        "warm-up": warm_model,
        "start": folder / "start",
        "rwml": folder / "run" / "hf",
        "wm-sft": folder / "wm-sft",
    }
    records = []
    for model_name, model_path in models.items():
        next_state = evaluate(model_path, *RECIPE, "--env.triplets", triplets, "--eval.games", 0)
        task = evaluate(model_path, "--recipe", "quickstart")
        record = {"model": model_name, **columns("next_state", next_state), **columns("task", task)}
        records.append(record | versions)
    write(RESULTS / "rwml_quickstart.csv", records)


def make_models(folder: Path, model: Path, triplets: Path) -> None:
    """Collects triplets with the warmed-up model and makes the other models from them."""
    kept_path = folder / "kept.jsonl"
    start_path = folder / "start"
    learner = ("--model", model, *RECIPE)
    games = ("--recipe", "quickstart", "--tasks", 200, "--rwml.dedup", "true")
    commands: dict[Path, tuple[object, ...]] = {
        triplets: ("collect", model, *games),
        start_path: ("sft", triplets, *learner, "--share", 0.1),
        kept_path: ("filter", triplets, *learner),
        folder / "wm-sft": ("sft", triplets, *learner, "--rwml.sft_epochs", 2),
    }
    for target, arguments in commands.items():
        if not target.exists():
            (folder / f"{target.stem}.log").write_text(paw("rwml", *arguments, "--out", target))
    if not (folder / "run" / "report.html").exists():
        settings = {
            "env.triplets": kept_path,
            "model.path": start_path,
            "run.dir": folder,
            "run.name": "run",
            "eval.games": 0,
        }
        paw("train", "rwml-quickstart", *flags(settings))


def columns(kind: str, evaluation: dict[str, float]) -> dict[str, float]:
    """Success and its interval, as columns whose names begin with `kind`."""
    return {
        f"{kind}_{column}": evaluation[column]
        for column in ("success", "ci_low", "ci_high", "games")
    }


if __name__ == "__main__":
    main()
