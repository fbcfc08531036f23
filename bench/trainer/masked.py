"""How many selected observations the world model already knows, so that they need not run through the body.

    python bench/trainer/masked.py [--recipe quickstart] [--updates 60] [--model DIR]

Writes bench/results/masked_cpu.csv.

Trains with PaW. In each update it counts three kinds of selected samples. `masked`: every token of
the observation is masked (p > rho), which is only known after the pass. `ruled`: a rule predicts
this before the pass, because the same observation was masked everywhere in the previous update.
`wrong`: the rule predicts it wrongly. `skipped` counts the tokens that the rule would take out of
the update: separator and observation, and the full row if it has no advantage either.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, write
from paw import train, trainer
from paw.algo import loss as losses
from paw.config.recipe import load
from paw.rundir.record import code_commit
from paw.types import Sample

COUNTS = ("tokens", "selected", "masked", "ruled", "wrong", "skipped")
MaskedAt = dict[tuple[int, ...], list[bool]]
"""An observation's tokens -> whether it was masked, for each place where it occurs in an update."""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--model", help="the start model, instead of the recipe's warm-up")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        keys = {
            "run.dir": scratch,
            "run.updates": str(options.updates),
            "run.threads": "1",
            "eval.every": "0",
            "wm.enabled": "true",
        }
        if options.model:
            keys["model.path"] = options.model
        config = load(options.recipe, keys)
        watch = Watch(options.recipe, config.wm.rho)
        trainer.optimize = watch.optimize
        losses.token_batch = watch.token_batch
        losses.joint_loss = watch.joint_loss
        train(config)

    write(RESULTS / "masked_cpu.csv", watch.table)
    show_ends(watch.table)


class Watch:
    """Replaces three functions of the trainer, calls them, and counts observations."""

    def __init__(self, recipe: str, rho: float) -> None:
        self.recipe = recipe
        self.rho = rho
        self.table: list[dict[str, Any]] = []
        """A row for each update."""
        self._counts = dict.fromkeys(COUNTS, 0)
        self._minibatch: Sequence[Sample] = ()
        self._previous: MaskedAt = {}
        """What was masked in the previous update."""
        self._current: MaskedAt = {}
        self._optimize = trainer.optimize
        self._token_batch = losses.token_batch
        self._joint_loss = losses.joint_loss

    def optimize(self, run: Any, samples: Any) -> Any:
        self._counts = dict.fromkeys(COUNTS, 0)
        metrics = self._optimize(run, samples)
        self.table.append(
            {
                "recipe": self.recipe,
                "update": run.step + 1,
                "samples": len(samples),
                **self._counts,
                "masked_tokens": round(metrics.get("wm/masked_frac", 0.0), 4),
                "commit": code_commit(),
            }
        )
        self._previous = self._current
        self._current = {}
        return metrics

    def token_batch(self, batch: Any, samples: Any, **options: Any) -> Any:
        self._minibatch = samples
        return self._token_batch(batch, samples, **options)

    def joint_loss(self, model: Any, batch: Any, tokens: Any, *rest: Any, **options: Any) -> Any:
        result = self._joint_loss(model, batch, tokens, *rest, **options)
        self._counts["tokens"] += len(batch.input_ids)
        for position, sample_index in enumerate(batch.indices):
            is_observation = tokens.observation & (tokens.sample == position)
            if is_observation.any():
                masked = bool((result.logp[is_observation].exp() > self.rho).all())
                self._count(self._minibatch[sample_index], masked)
        return result

    def _count(self, sample: Sample, masked: bool) -> None:
        """Counts a selected sample. `masked`: whether every token of its observation is masked."""
        observation = tuple(sample.observation_ids.tolist())
        ruled = all(self._previous.get(observation, [False]))
        self._counts["selected"] += 1
        self._counts["masked"] += masked
        self._counts["ruled"] += ruled
        self._counts["wrong"] += ruled and not masked
        if ruled:
            skipped = len(sample.separator_ids) + len(observation)
            if not sample.advantages.any():
                skipped += len(sample.prompt_ids) + len(sample.response_ids)
            self._counts["skipped"] += skipped
        self._current.setdefault(observation, []).append(masked)


def show_ends(table: list[dict[str, Any]]) -> None:
    """Prints the shares over the first and the last quarter of the updates."""
    quarter = max(1, len(table) // 4)
    show(table[:quarter])
    show(table[-quarter:])


def show(records: list[dict[str, Any]]) -> None:
    """Prints the shares over some updates."""
    totals = {count_name: sum(record[count_name] for record in records) for count_name in COUNTS}
    shares = {}
    for count_name in ("masked", "ruled", "wrong"):
        shares[count_name] = f"{totals[count_name] / totals['selected']:.1%}"
    skipped = totals["skipped"] / totals["tokens"]
    print(
        f"updates {records[0]['update']} to {records[-1]['update']}: {totals['selected']:,} selected,"
        f" {shares}, tokens of the update {skipped:.1%}"
    )


if __name__ == "__main__":
    main()
