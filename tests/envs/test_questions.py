"""Question sets loaded through `datasets`: files, folders, columns, splits, scores and tries. Also
generated maths problems."""

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


def factory(data, **changes):
    settings = {
        f"env.{key}": value if value is None else str(value) for key, value in changes.items()
    }
    settings = {key: "none" if value is None else value for key, value in settings.items()}
    return make_factory(load("questions-grpo", {"env.data": str(data), **settings}))


def start(factory_of_set, task=None):
    environment = factory_of_set.make()
    environment.reset(task or factory_of_set.tasks(factory_of_set.config.train_split, 0)[0])
    return environment


def refused(data, **keys) -> str:
    with pytest.raises(UserError) as error:
        factory(data, **keys)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_kind_that_means_all_of_them_is_refused_and_a_split_of_that_name_is_none(tmp_path):
    rows = [{**row, "level": "All" if number == 4 else "easy"} for number, row in enumerate(ROWS)]
    message = refused(write(tmp_path / "levels.jsonl", rows), kind="level")
    problem = "train, row 5: 'level' is 'All', a name that reports use for all kinds; rename it there, or name another"
    assert f"{problem} column with env.kind" in message
    import datasets

    datasets.DatasetDict({"all": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "set")
    split_factory = factory(tmp_path / "set", train_split="all")
    assert {task.kind for task in train_tasks(split_factory, 0, 20, 0)} == {"task"}


def test_a_set_is_the_same_from_any_file_and_a_tenth_is_held_out(tmp_path):
    factories = [
        factory(write(tmp_path / f"some{suffix}")) for suffix in (".parquet", ".jsonl", ".csv")
    ]
    prints = {
        factory_of_file.fingerprint().replace(str(factory_of_file.config.data), "")
        for factory_of_file in factories
    }
    assert len(prints) == 1
    assert "asked in held_out" in prints.pop()
    for factory_of_file in factories:
        held_out = eval_tasks(factory_of_file, "auto", 0, 0)
        assert [task.id for task in held_out] == ["train/9", "train/19", "train/29"]
        trained = train_tasks(factory_of_file, 0, 27, 0)
        assert len({task.id for task in trained} | {task.id for task in held_out}) == 30
        assert trained[0].payload["question"].startswith("What is ")
    changed = write(tmp_path / "other.jsonl", [*ROWS[:-1], {**ROWS[-1], "answer": "61"}])
    assert factory(changed).fingerprint().split()[2] != factories[1].fingerprint().split()[2]


def test_a_folder_has_splits_and_columns_go_by_keys(tmp_path):
    rows = [{"ask": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]},
             "right": [2.0, 3.0], "source": "sums", "persona": "You add."}]  # fmt: skip
    write(tmp_path / "set" / "train.jsonl", rows)
    write(tmp_path / "set" / "test.jsonl", [{**row, "source": "more"} for row in rows])
    columns = {"question": "ask.messages", "answer": "right", "kind": "source"}
    set_factory = factory(tmp_path / "set", **columns)
    (task,) = eval_tasks(set_factory, "auto", 0, 0)
    assert task.id == "test/0"
    assert task.kind == "more"
    assert set_factory.tasks("train", 0)[0].kind == "sums"
    environment = start(set_factory, task)
    system, question = environment.context()
    assert system == {"role": "system", "content": "Be brief."}
    assert question["role"] == "user"
    assert (
        question["content"]
        == "1 + 1?\n\nReason step by step, then give the final answer as <answer>...</answer>."
    )
    assert environment.task == "1 + 1?"
    assert environment.step(environment.oracle()).won
    assert environment.oracle() == "<answer>2</answer>"
    system, _ = start(factory(tmp_path / "set", **columns, system="persona"), task).context()
    assert system["content"] == "You add."
    assert (
        eval_tasks(factory(tmp_path / "set", **columns, eval_split="train"), "train", 0, 0)[0].kind
        == "sums"
    )


WRONG_ROWS = [
    ({"answer": None}, "'answer' is empty"),
    ({"answer": ""}, "'answer' is empty"),
    ({"question": None}, "'question' is empty"),
    ({"answer": "none"}, "the answer 'none' has no number (env.score = 'number')"),
]


def test_what_is_wrong_with_a_set_is_one_line(tmp_path, monkeypatch):
    good_file = write(tmp_path / "good.jsonl")
    origin = f"env.data = '{good_file}'"
    columns = "it has question, answer, level"
    assert (
        refused(good_file, question="problem")
        == f"env.question = 'problem': {origin} has no such column; {columns}"
    )
    assert (
        refused(good_file, system="s")
        == f"env.system = 's': {origin} has no such column; {columns}"
    )
    assert (
        refused(good_file, train_split="dev")
        == f"env.train_split = 'dev': {origin} has no such split, only train"
    )
    assert (
        refused(good_file, eval_split="dev")
        == f"env.eval_split = 'dev': {origin} has no such split, only train"
    )
    assert refused(good_file, answer=None).endswith("needs env.answer, which is not set")
    assert refused(good_file, score="nmber").startswith("env.score = there is no 'nmber'")
    assert refused(tmp_path / "none.jsonl").endswith("none.jsonl': there is no such file or folder")
    assert refused(write(tmp_path / "a.parquet").rename(tmp_path / "a.txt")).endswith(
        ".parquet, .jsonl, .json, .csv"
    )
    for number, (changes, reason) in enumerate(WRONG_ROWS):
        path = write(tmp_path / f"{number}.jsonl", [ROWS[0], {**ROWS[1], **changes}])
        assert refused(path) == f"env.data = '{path}': train, row 2: {reason}"
    assert "not a regular expression" in refused(
        write(tmp_path / "r.jsonl", [{**ROWS[0], "answer": "("}]), score="regex"
    )
    ends_with_answer = [
        {
            "question": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "answer": "1",
        }
    ]
    assert "it must be the user's question" in refused(
        write(tmp_path / "ends.jsonl", ends_with_answer)
    )
    broken_file = tmp_path / "broken.jsonl"
    broken_file.write_text('{"question": "1')
    assert refused(broken_file).startswith(f"env.data = '{broken_file}': ")
    empty_file = tmp_path / "empty.jsonl"
    empty_file.write_text("")
    assert refused(empty_file).startswith(f"env.data = '{empty_file}': ")
    check_refused_names_of_the_hub(monkeypatch)


def check_refused_names_of_the_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    problem = "there is no such file or folder, it is not in the cache of datasets, and HF_HUB_OFFLINE is set"
    assert refused("openai/gsm8k", subset="main") == f"env.data = 'openai/gsm8k': {problem}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "127.0.0.1 cannot be reached (Connection refused)" in refused("openai/gsm8k")


def test_tries_are_a_conversation_whose_verdicts_are_observed(tmp_path):
    set_factory = factory(write(tmp_path / "some.jsonl"), max_turns=3, score="number")
    environment = start(set_factory, set_factory.tasks("train", 0)[4])
    question = environment.context()
    first_try = environment.step("no tags")
    assert first_try.valid is False
    assert first_try.done is False
    assert first_try.reward == 0.0
    assert (
        first_try.observation == "There is no answer. Give it as <answer>...</answer>. Try again."
    )
    second_try = environment.step("<answer>7</answer> or <answer>9</answer>")
    assert second_try.valid is True
    assert second_try.action == "9"
    assert second_try.observation == "That is wrong. Try again."
    conversation = environment.context()
    assert [message["role"] for message in conversation] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert conversation[0]["content"] == question
    assert conversation[-1]["content"] == second_try.observation
    last_try = environment.step("<answer>it is 8.0</answer>")
    assert last_try.reward == 1.0
    assert last_try.done is True
    assert last_try.won is True
    assert last_try.observation == "That is right."
    single = start(factory(tmp_path / "some.jsonl")).step("<answer>1</answer>")
    assert single.reward == 0.0
    assert single.done is True
    assert single.won is False


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
    set_factory = factory(
        write(tmp_path / "one.jsonl", [{"question": "?", "answer": right}]),
        score=score,
        format="{answer}",
    )
    assert start(set_factory).step(answer).won is won


def test_a_score_of_ones_own_is_partial_and_speaks(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    settings = {
        "score": f"{tmp_path / 'mine.py'}:judge",
        "answer": None,
        "max_turns": 3,
        "format": "\\boxed{{answer}}",
    }
    set_factory = factory(write(tmp_path / "some.jsonl"), **settings)
    environment = start(set_factory)
    assert set_factory.may_block
    outcome = environment.step("so \\boxed{close}.")
    assert outcome.score == 0.5
    assert outcome.reward == 0.0
    assert outcome.observation == "close to 0 Try again."
    assert environment.step("\\boxed{0}").reward == 1.0
    environment = start(set_factory)
    with pytest.raises(EnvironmentFailure, match="returned 7; it must be a number from 0 to 1"):
        environment.step("\\boxed{boom}")


def test_the_pages_functions_score(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    for number, (text_around, right, answer, score) in enumerate(
        [
            ("math_verify", "$\\frac{1}{2}$", "0.5", 1.0),
            ("got - wanted", "red green", "red blue", 1 / 3),
        ]
    ):
        if text_around == "math_verify":
            pytest.importorskip(
                "math_verify", reason="the optional package math-verify is not installed"
            )
        (code,) = (
            block
            for block in re.findall(r"  ```python\n(.*?)  ```", page, re.DOTALL)
            if text_around in block
        )
        (tmp_path / f"page{number}.py").write_text(textwrap.dedent(code))
        data_file = write(tmp_path / f"{number}.jsonl", [{"question": "?", "answer": right}])
        set_factory = factory(data_file, score=f"{tmp_path / f'page{number}.py'}:judge")
        threads = make_threads(set_factory, set_factory.config, 4)
        # a scoring function that hangs costs its episode
        assert threads.count == 4
        assert threads.timeout_s == 60.0
        assert threads.call(
            start(set_factory).step, f"<answer>{answer}</answer>"
        ).score == pytest.approx(score)
        threads.close()


def test_a_set_with_few_answers_can_be_warmed_up_on(tmp_path):
    rows = [{"question": f"Is {n} odd?", "answer": ("no", "yes")[n % 2]} for n in range(30)]
    few_answers = factory(write(tmp_path / "few.jsonl", rows), score="exact")
    tasks = few_answers.tasks("warmup", 0)
    assert {task.id for task in tasks} == {task.id for task in few_answers.tasks("train", 0)}
    environment = few_answers.make()
    for task in (tasks[0], tasks[1]):
        environment.reset(task)
        assert environment.admissible_actions() == ["no", "yes"]
        assert environment.step(environment.oracle()).won

    rows = [{"question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(120)]
    many_answers = factory(write(tmp_path / "many.jsonl", rows))
    assert many_answers.make().admissible_actions() == []
    with pytest.raises(
        UserError, match=r"among right answers of env\.data: there are more than 100"
    ):
        many_answers.tasks("warmup", 0)


def test_generated_problems_are_right_and_in_one_split_only():
    texts = {}
    for split in questions.SPLITS:
        rows = [
            questions.problem(split, 0, number, operations=4, largest=300) for number in range(150)
        ]
        assert rows[7] == questions.problem(split, 0, 7, operations=4, largest=300)
        assert {row["steps"] for row in rows} == set(questions.STEPS)
        # Such simple problems would often be in two splits by chance.
        simple_problems = (
            questions.problem(split, 0, number, operations=1, largest=5) for number in range(1000)
        )
        texts[split] = {row["question"] for row in simple_problems}
        assert all(solved(row["question"]) == int(row["answer"]) <= 300 for row in rows)
    assert not texts["train"] & texts["test"]
    assert not texts["train"] & texts["warmup"]
    assert not texts["test"] & texts["warmup"]
    maths_factory = make_factory(load("maths-quickstart"))
    warm_up = warmup_tasks(maths_factory, 0, 5, 0)
    environment = start(maths_factory, warm_up[0])
    assert environment.context() == warm_up[0].payload["question"]
    assert environment.step(environment.oracle()).won
    assert environment.admissible_actions() == [str(answer) for answer in range(1, 11)]
    with pytest.raises(
        UserError, match="generated problems have no split 'dev', only test, warmup, train"
    ):
        make_factory(load("maths-quickstart", {"env.eval_split": "dev"}))


def solved(text: str) -> int:
    """The answer to a problem, computed from its words."""
    opening, *sentences, _ = text.replace("?", ".").split(". ")
    amounts = {opening.split()[0]: Fraction(opening.split()[2])}
    for sentence in sentences:
        words = sentence.replace(".", "").replace(",", "").split()
        number = Fraction(next(word for word in words if word.isdigit()))
        compared = words[-1] if words[-2] in ("than", "as") else words[0]
        owner = words[-1] if "shares" in words else words[0]
        compared = compared if compared in amounts else words[0]
        amount = amounts[compared]
        results = {
            "more": amount + number,
            "fewer": amount - number,
            "loses": amount - number,
            "sells": amount - number,
            "times": amount * number,
            "shares": amount / number,
            "keeps": amount / number,
        }
        amounts[owner] = next(value for word, value in results.items() if word in words)
    quantity = text.rstrip("?").split()[-3]
    return int(amounts[quantity]) if amounts[quantity].denominator == 1 else -1
