"""Question sets through `datasets`: files, folders, columns, splits, scores, tries; and generated maths problems."""

import json
import re
import textwrap
from fractions import Fraction
from pathlib import Path

import pytest

from paw.config.recipe import load
from paw.envs import make_factory
from paw.envs.base import eval_tasks, train_tasks, warmup_tasks
from paw.envs.bridges import questions
from paw.errors import EnvironmentFailure, UserError
from paw.rollouts.guard import make_threads

ROWS = [
    {"question": f"What is {n} + {n}?", "answer": f"{n} and {n} #### {n + n}", "level": n % 2}
    for n in range(30)
]
OWN = """
def judge(answer, row):
    if answer == "boom":
        return 7
    right = str(row["level"])
    return 1.0 if answer == right else (0.5, f"close to {right}") if answer == "close" else 0
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip(
        "datasets", reason="the optional package datasets is not installed"
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(path: Path, rows=ROWS) -> Path:
    import datasets

    path.parent.mkdir(exist_ok=True, parents=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".csv":
        datasets.Dataset.from_list(rows).to_csv(path)
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    return path


def factory(data, **keys):
    given = {f"env.{key}": value if value is None else str(value) for key, value in keys.items()}
    given = {key: "none" if value is None else value for key, value in given.items()}
    return make_factory(load("questions-grpo", {"env.data": str(data), **given}))


def start(made, task=None):
    env = made.make()
    env.reset(task or made.tasks(made.config.train_split, 0)[0])
    return env


def refused(data, **keys) -> str:
    with pytest.raises(UserError) as error:
        factory(data, **keys)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_kind_that_means_all_of_them_is_refused_and_a_split_of_that_name_is_none(tmp_path):
    rows = [{**row, "level": "All" if i == 4 else "easy"} for i, row in enumerate(ROWS)]
    said = refused(write(tmp_path / "levels.jsonl", rows), kind="level")
    problem = "train, row 5: 'level' is 'All', which reports call all kinds together; rename it there, or name another"
    assert f"{problem} column with env.kind" in said
    import datasets

    datasets.DatasetDict({"all": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "set")
    made = factory(tmp_path / "set", train_split="all")
    assert {task.kind for task in train_tasks(made, 0, 20, 0)} == {"task"}


def test_a_set_is_the_same_from_any_file_and_a_tenth_is_held_out(tmp_path):
    made = [factory(write(tmp_path / f"some{suffix}")) for suffix in (".parquet", ".jsonl", ".csv")]
    prints = {one.fingerprint().replace(str(one.config.data), "") for one in made}
    assert len(prints) == 1 and "asked in held_out" in prints.pop()
    for one in made:
        held_out = eval_tasks(one, "auto", 0, 0)
        assert [task.id for task in held_out] == ["train/9", "train/19", "train/29"]
        trained = train_tasks(one, 0, 27, 0)
        assert len({task.id for task in trained} | {task.id for task in held_out}) == 30
        assert trained[0].payload["question"].startswith("What is ")
    changed = write(tmp_path / "other.jsonl", [*ROWS[:-1], {**ROWS[-1], "answer": "61"}])
    assert factory(changed).fingerprint().split()[2] != made[1].fingerprint().split()[2]


def test_a_folder_has_splits_and_columns_go_by_keys(tmp_path):
    rows = [{"ask": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]},
             "right": [2.0, 3.0], "source": "sums", "persona": "You add."}]  # fmt: skip
    write(tmp_path / "set" / "train.jsonl", rows)
    write(tmp_path / "set" / "test.jsonl", [{**row, "source": "more"} for row in rows])
    columns = {"question": "ask.messages", "answer": "right", "kind": "source"}
    made = factory(tmp_path / "set", **columns)
    (task,) = eval_tasks(made, "auto", 0, 0)
    assert (task.id, task.kind) == ("test/0", "more") and made.tasks("train", 0)[0].kind == "sums"
    env = start(made, task)
    system, asked = env.context()
    assert system == {"role": "system", "content": "Be brief."} and asked["role"] == "user"
    assert (
        asked["content"]
        == "1 + 1?\n\nReason step by step, then give the final answer as <answer>...</answer>."
    )
    assert (
        env.task == "1 + 1?" and env.step(env.oracle()).won and env.oracle() == "<answer>2</answer>"
    )
    system, _ = start(factory(tmp_path / "set", **columns, system="persona"), task).context()
    assert system["content"] == "You add."
    assert (
        eval_tasks(factory(tmp_path / "set", **columns, eval_split="train"), "train", 0, 0)[0].kind
        == "sums"
    )


def test_what_is_wrong_with_a_set_is_one_line(tmp_path, monkeypatch):
    good = write(tmp_path / "good.jsonl")
    where = f"env.data = '{good}'"
    columns = "it has question, answer, level"
    assert (
        refused(good, question="problem")
        == f"env.question = 'problem': {where} has no such column; {columns}"
    )
    assert refused(good, system="s") == f"env.system = 's': {where} has no such column; {columns}"
    assert (
        refused(good, train_split="dev")
        == f"env.train_split = 'dev': {where} has no such split, only train"
    )
    assert (
        refused(good, eval_split="dev")
        == f"env.eval_split = 'dev': {where} has no such split, only train"
    )
    assert refused(good, answer=None).endswith("needs env.answer, which is none")
    assert refused(good, score="nmber").startswith("env.score = there is no 'nmber'")
    assert refused(tmp_path / "none.jsonl").endswith("none.jsonl': there is no such file or folder")
    assert refused(write(tmp_path / "a.parquet").rename(tmp_path / "a.txt")).endswith(
        ".parquet, .jsonl, .json, .csv"
    )
    for i, (row, reason) in enumerate(
        [
            ({"answer": None}, "'answer' is empty"),
            ({"answer": ""}, "'answer' is empty"),
            ({"question": None}, "'question' is empty"),
            ({"answer": "none"}, "the answer 'none' has no number (env.score = 'number')"),
        ]
    ):
        path = write(tmp_path / f"{i}.jsonl", [ROWS[0], {**ROWS[1], **row}])
        assert refused(path) == f"env.data = '{path}': train, row 2: {reason}"
    assert "not a regular expression" in refused(
        write(tmp_path / "r.jsonl", [{**ROWS[0], "answer": "("}]), score="regex"
    )
    ends = [
        {
            "question": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "answer": "1",
        }
    ]
    assert "it must be the user's question" in refused(write(tmp_path / "ends.jsonl", ends))
    (tmp_path / "broken.jsonl").write_text('{"question": "1')
    assert refused(tmp_path / "broken.jsonl").startswith(
        f"env.data = '{tmp_path / 'broken.jsonl'}': "
    )
    (tmp_path / "empty.jsonl").write_text("")
    assert refused(tmp_path / "empty.jsonl").startswith(
        f"env.data = '{tmp_path / 'empty.jsonl'}': "
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lacks = "there is no such file or folder, it is not in the cache of datasets, and HF_HUB_OFFLINE is set"
    assert refused("openai/gsm8k", subset="main") == f"env.data = 'openai/gsm8k': {lacks}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "127.0.0.1 cannot be reached (Connection refused)" in refused("openai/gsm8k")


def test_tries_are_a_conversation_whose_verdicts_are_observed(tmp_path):
    made = factory(write(tmp_path / "some.jsonl"), max_turns=3, score="number")
    env = start(made, made.tasks("train", 0)[4])
    asked = env.context()
    first = env.step("no tags")
    assert (first.valid, first.done, first.reward) == (False, False, 0.0)
    assert first.observation == "There is no answer. Give it as <answer>...</answer>. Try again."
    second = env.step("<answer>7</answer> or <answer>9</answer>")
    assert (second.valid, second.action, second.observation) == (
        True,
        "9",
        "That is wrong. Try again.",
    )
    conversation = env.context()
    assert [message["role"] for message in conversation] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert conversation[0]["content"] == asked and conversation[-1]["content"] == second.observation
    last = env.step("<answer>it is 8.0</answer>")
    assert (last.reward, last.done, last.won, last.observation) == (
        1.0,
        True,
        True,
        "That is right.",
    )
    single = start(factory(tmp_path / "some.jsonl")).step("<answer>1</answer>")
    assert (single.reward, single.done, single.won) == (0.0, True, False)


@pytest.mark.parametrize(
    ("score", "right", "answer", "won"),
    [
        ("exact", "The Nile", "nile.", True),
        ("exact", "Nile", "Niles", False),
        ("number", "#### 1,250", "$1250.00", True),
        ("number", "1/2", "0.5 kg", True),
        ("number", "3", "1/0", False),
        ("number", "-3", "3", False),
        ("regex", r"[Yy]es|true", "yes", True),
        ("regex", r"[Yy]es|true", "yes, it is", False),
    ],
)
def test_scores(tmp_path, score, right, answer, won):
    made = factory(
        write(tmp_path / "one.jsonl", [{"question": "?", "answer": right}]),
        score=score,
        format="{answer}",
    )
    assert start(made).step(answer).won is won


def test_a_score_of_ones_own_is_partial_and_speaks(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    own = {
        "score": f"{tmp_path / 'mine.py'}:judge",
        "answer": None,
        "max_turns": 3,
        "format": "\\boxed{{answer}}",
    }
    made = factory(write(tmp_path / "some.jsonl"), **own)
    env = start(made)
    assert made.may_block
    first = env.step("so \\boxed{close}.")
    assert (first.score, first.reward, first.observation) == (0.5, 0.0, "close to 0 Try again.")
    assert env.step("\\boxed{0}").reward == 1.0
    env = start(made)
    with pytest.raises(EnvironmentFailure, match="returned 7; it must be a number from 0 to 1"):
        env.step("\\boxed{boom}")


def test_the_pages_functions_score(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    for i, (mark, right, answer, score) in enumerate(
        [
            ("math_verify", "$\\frac{1}{2}$", "0.5", 1.0),
            ("got - wanted", "red green", "red blue", 1 / 3),
        ]
    ):
        if mark == "math_verify":
            pytest.importorskip(
                "math_verify", reason="the optional package math-verify is not installed"
            )
        (code,) = (
            block
            for block in re.findall(r"  ```python\n(.*?)  ```", page, re.DOTALL)
            if mark in block
        )
        (tmp_path / f"page{i}.py").write_text(textwrap.dedent(code))
        data = write(tmp_path / f"{i}.jsonl", [{"question": "?", "answer": right}])
        made = factory(data, score=f"{tmp_path / f'page{i}.py'}:judge")
        threads = make_threads(made, made.config, 4)
        assert (threads.count, threads.timeout_s) == (
            4,
            60.0,
        )  # a function that hangs costs its episode
        assert threads.call(start(made).step, f"<answer>{answer}</answer>").score == pytest.approx(
            score
        )
        threads.close()


def test_generated_problems_are_right_and_in_one_split_only():
    texts = {}
    for split in questions.SPLITS:
        rows = [questions.problem(split, 0, i, operations=4, largest=300) for i in range(150)]
        assert rows[7] == questions.problem(split, 0, 7, operations=4, largest=300)
        assert {row["steps"] for row in rows} == set(questions.STEPS)
        # Which would often meet.
        few = (questions.problem(split, 0, i, operations=1, largest=5) for i in range(1000))
        texts[split] = {row["question"] for row in few}
        assert all(solved(row["question"]) == int(row["answer"]) <= 300 for row in rows)
    assert not (
        texts["train"] & texts["test"]
        or texts["train"] & texts["warmup"]
        or texts["test"] & texts["warmup"]
    )
    made = make_factory(load("maths-quickstart"))
    warm = warmup_tasks(made, 0, 5, 0)
    env = start(made, warm[0])
    assert env.context() == warm[0].payload["question"] and env.step(env.oracle()).won
    assert env.admissible_actions() == [str(n) for n in range(1, 11)]
    with pytest.raises(
        UserError, match="generated problems have no split 'dev', only test, warmup, train"
    ):
        make_factory(load("maths-quickstart", {"env.eval_split": "dev"}))


def solved(text: str) -> int:
    """The answer, read off the words of a problem."""
    first, *story, _ = text.replace("?", ".").split(". ")
    has = {first.split()[0]: Fraction(first.split()[2])}
    for sentence in story:
        words = sentence.replace(".", "").replace(",", "").split()
        k = Fraction(next(word for word in words if word.isdigit()))
        base = words[-1] if words[-2] in ("than", "as") else words[0]
        whose = words[-1] if "shares" in words else words[0]
        base = base if base in has else words[0]
        signs = {"more": has[base] + k, "fewer": has[base] - k, "loses": has[base] - k, "sells": has[base] - k,
                 "times": has[base] * k, "shares": has[base] / k, "keeps": has[base] / k}  # fmt: skip
        has[whose] = next(value for word, value in signs.items() if word in words)
    asked = text.rstrip("?").split()[-3]
    return int(has[asked]) if has[asked].denominator == 1 else -1
