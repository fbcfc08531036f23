"""RWML in miniature, stage 1: how well next states are predicted, and games played, before and after.

    python bench/studies/rwml_quickstart.py [--folder runs/rwml]

Writes bench/results/rwml_quickstart.csv, and rwml_filter.txt, the easy filter's output. From one
warmed-up quickstart model: `start`, fine-tuned on a tenth of its triplets (it was never asked for
next states before); `rwml`, GRPO on next states from there; `wm-sft`, the baseline, fine-tuned on
all training triplets. What the folder holds already is not made again.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, evaluate, paw, write

RECIPE = ("--recipe", "rwml-quickstart")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "rwml")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    triplets, kept, start, tuned = (
        folder / name for name in ("triplets.jsonl", "kept.jsonl", "start", "wm-sft")
    )
    model = Path(paw("warmup", "quickstart-long").strip())
    learner = ("--model", model, *RECIPE)
    games = ("--recipe", "quickstart", "--tasks", 200, "--rwml.dedup", "true")
    for made, words in {
        triplets: ("collect", model, *games),
        start: ("sft", triplets, *learner, "--share", 0.1),
        kept: ("filter", triplets, *learner),
        tuned: ("sft", triplets, *learner, "--rwml.sft_epochs", 2),
    }.items():
        if not made.exists():
            (folder / f"{made.stem}.log").write_text(paw("rwml", *words, "--out", made))
    if not (folder / "run" / "report.html").exists():
        where = ("--run.dir", folder, "--run.name", "run", "--eval.games", 0)
        paw("train", "rwml-quickstart", "--env.triplets", kept, "--model.path", start, *where)
    (RESULTS / "rwml_filter.txt").write_text(
        (folder / "kept.log").read_text().replace(f": {kept}", "")
    )
    about = json.loads((folder / "run" / "run.json").read_text())
    rows = []
    for name, path in {
        "warm-up": model,
        "start": start,
        "rwml": folder / "run" / "hf",
        "wm-sft": tuned,
    }.items():
        states = evaluate(path, *RECIPE, "--env.triplets", triplets, "--eval.games", 0)
        played = evaluate(path, "--recipe", "quickstart")
        shares = {f"{kind}_{key}": found[key] for kind, found in {"next_state": states, "task": played}.items()
                  for key in ("success", "ci_low", "ci_high", "games")}  # fmt: skip
        rows.append(
            {"model": name, **shares, **{key: about[key] for key in ("paw", "torch", "device")}}
        )
    write(RESULTS / "rwml_quickstart.csv", rows)


if __name__ == "__main__":
    main()
