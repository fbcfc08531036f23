"""Questions from a file, and a small model that learns to answer them.

The set may have any columns, and may be JSON lines, CSV, parquet or a data set on the Hugging Face
hub. Here the script first writes 3,000 sums in words to files. A seventh of them is held out, and
success is reported for each `size`.

Needs: pip install 'paw-trainer[data]'
Took: 43 s of processor time on one thread of an AMD EPYC, including the start model.
Change first: `--env.data FILE_OR_HUB_NAME` with the names of its columns (`--env.question`,
`--env.answer`); then `--model.path`, a pretrained model, and `--env.score FILE.py:judge`, a score
of your own.
"""

import json
from itertools import product
from pathlib import Path

import paw

NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fatima")
THINGS = ("cups", "books", "stamps", "shells", "coins")


def write_questions(folder):
    rows = []
    for name, thing, a, b in product(NAMES, THINGS, range(10), range(10)):
        question = f"{name} has {a} {thing} and gets {b} more. How many now?"
        size = "small" if a + b < 10 else "large"
        rows.append({"problem": question, "solution": a + b, "size": size})
    folder.mkdir(exist_ok=True)
    splits = {"test": rows[::7], "train": [row for n, row in enumerate(rows) if n % 7]}
    for split, chosen in splits.items():
        lines = [json.dumps(row) + "\n" for row in chosen]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def main(words):
    changes = {
        "env.name": "questions", "env.data": write_questions(Path("sums")), "env.score": "number",
        "env.question": "problem", "env.answer": "solution", "env.kind": "size",
        "env.instruction": "", "env.format": "answer {answer}", "env.max_turns": 1,
        "rollout.max_response_tokens": 4, "run.updates": 40, "run.name": "question-set",
        "warmup.max_steps": 120, "warmup.corpus_turns": 1000, "eval.games": 128,
    }  # fmt: skip
    report = paw.train(paw.load("quickstart", words, **changes), numbered=True)
    for key in ("eval/success", "eval/success_small", "eval/success_large"):
        shares = [*paw.metric(report.parent, key).values()]
        print(f"{key}: {shares[0]:.0%} -> {shares[-1]:.0%} of the held-out questions")
    print(report)


if __name__ == "__main__":
    paw.script(main)
