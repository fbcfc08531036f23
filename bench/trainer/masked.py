"""How many of the selected observations the world model knows already, so that they need not run through the body.

    python bench/trainer/masked.py [--recipe quickstart] [--updates 60] [--model DIR]

Writes bench/results/masked_cpu.csv.

Trains with PaW and counts in each update, of the selected samples: those whose observation is
masked in every token (p > rho), which only the pass itself tells; those that a rule can know before
it, because the same observation was masked in all its places in the update before; and of these the
ones where the rule is wrong. `skipped`: the tokens that the rule would take out of the update:
separator and observation, and the whole row where it has no advantage either.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, write
from paw import trainer
from paw.algo import loss as losses
from paw.recipe import load
from paw.state.record import code_commit
from paw.types import Sample

Seen = dict[tuple[int, ...], list[bool]]


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--model", help="where to start, in place of the recipe's warm-up")
    options = parser.parse_args()
    optimize, joint_loss = trainer.optimize, losses.joint_loss
    table, before, now, counts = (
        list[dict[str, Any]](),
        Seen(),
        defaultdict[Any, list[bool]](list),
        dict[str, int](),
    )
    minibatch: list[Sample] = []

    def token_batch(batch: Any, samples: Any, **rest: Any) -> Any:
        minibatch[:] = samples
        return make(batch, samples, **rest)

    def watched_loss(model: Any, batch: Any, tokens: Any, *rest: Any, **keys: Any) -> Any:
        out = joint_loss(model, batch, tokens, *rest, **keys)
        counts["tokens"] += len(batch.input_ids)
        for place, i in enumerate(batch.indices):
            sample, own = minibatch[i], tokens.observation & (tokens.sample == place)
            if not own.any():
                continue
            key = tuple(sample.observation_ids)
            masked, ruled = bool((out.logp[own].exp() > rho).all()), all(before.get(key, [False]))
            counts["selected"] += 1
            counts["masked"] += masked
            counts["ruled"] += ruled
            counts["wrong"] += ruled and not masked
            alone = (
                0 if any(sample.advantages) else len(sample.prompt_ids) + len(sample.response_ids)
            )
            counts["skipped"] += ruled * (alone + len(sample.separator_ids) + len(key))
            now[key].append(masked)
        return out

    def watched(run: Any, samples: Any) -> Any:
        counts.update(
            dict.fromkeys(("tokens", "selected", "masked", "ruled", "wrong", "skipped"), 0)
        )
        found = optimize(run, samples)
        table.append(
            {"recipe": options.recipe, "update": run.step + 1, "samples": len(samples), **counts}
        )
        table[-1] |= {
            "masked_tokens": round(found.get("wm/masked_frac", 0.0), 4),
            "commit": code_commit(),
        }
        before.clear()
        before.update(now)
        now.clear()
        return found

    make = losses.token_batch
    losses.token_batch = token_batch
    losses.joint_loss = watched_loss
    trainer.optimize = watched
    with tempfile.TemporaryDirectory() as scratch:
        keys = {
            "run.dir": scratch,
            "run.updates": str(options.updates),
            "run.threads": "1",
            "eval.every": "0",
        }
        keys |= {"model.path": options.model} if options.model else {}
        config = load(options.recipe, keys | {"wm.enabled": "true"})
        rho = config.wm.rho
        trainer.train(config)
    write(RESULTS / "masked_cpu.csv", table)
    for part in (table[: len(table) // 4], table[-(len(table) // 4) :]):
        total = {key: sum(row[key] for row in part) for key in counts}
        share = {
            key: f"{total[key] / total['selected']:.1%}" for key in ("masked", "ruled", "wrong")
        }
        print(f"updates {part[0]['update']} to {part[-1]['update']}: {total['selected']:,} selected, {share}, "
              f"tokens of the update {total['skipped'] / total['tokens']:.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
