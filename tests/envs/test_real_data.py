"""Environments on the public files that they were made for, if those are on this machine
(../shared/data). Nothing is generated here. ALFWorld's official games are in
test_alfworld_factory.py, and the paper's tables in test_recipes.py."""

import gzip
import json
import os
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

from paw.config.sections import RunConfig
from paw.envs.base import eval_tasks
from paw.envs.search.factory import SearchFactory
from paw.envs.settings import SearchConfig, WebshopConfig
from paw.envs.webshop.factory import WebshopFactory
from paw.tools.evaluate.results import kind_rows

DATA = Path(__file__).parents[3] / "shared" / "data"


def at_hand(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"the public files are not at {DATA / name}")
    return DATA / name


def test_webshops_real_products_are_bought_by_the_buyer():
    folder = at_hand("webshop")
    factory = WebshopFactory(
        WebshopConfig(data=folder, eval_split="test", max_turns=15, nouns="rules")
    )
    held_out = factory.tasks("test", 0)
    train_tasks = factory.tasks("train", 0)
    assert len(factory.catalogue.products) == 100
    assert len(held_out) == 125
    assert len(train_tasks) == 376
    assert not {task.id for task in held_out} & {task.id for task in train_tasks}
    environment = factory.make()
    scores = []
    unreachable_goals = set()
    for task in [*held_out, *train_tasks]:
        goal = task.payload.goal
        environment.reset(task)
        while True:
            prompt = environment.context()
            outcome = environment.step(environment.oracle())
            assert goal.instruction.strip() in prompt
            assert outcome.valid
            if outcome.done:
                break
        scores.append(outcome.score)
        assert outcome.won == (outcome.score == 1.0)
        assert (outcome.reward > 0) == outcome.won
        if not outcome.won:
            unreachable_goals.add(goal.product.asin)
            # Everything was chosen as asked.
            assert {*environment.session.options.values()} == {*goal.options.values()}
    # WebShop's own score accepts "green2" for "green", "antique graywash" for "gray" and "dash kit"
    # for "dash".
    assert unreachable_goals == {"B07MGB73NJ", "B08QRHVS6N", "B09B7G7P58"}
    assert sum(score == 1.0 for score in scores) == 480
    assert min(scores) >= 2 / 3


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """(the development questions of NQ and HotpotQA as a test set in Search-R1's format, a factory
    for them)."""
    natural_questions = at_hand("search/nq_open_dev.jsonl.gz")
    hotpot = at_hand("search/hotpot_dev_v1_simplified.json.gz")
    folder = tmp_path_factory.mktemp("qa")
    lines = gzip.decompress(natural_questions.read_bytes()).decode().splitlines()
    rows_of_sets = [("nq", *json.loads(line).values()) for line in lines]
    rows_of_sets += [
        ("hotpotqa", entry["question"], entry["answer"])
        for entry in json.loads(gzip.decompress(hotpot.read_bytes()))
    ]
    columns = ("data_source", "question", "golden_answers")
    lines = [json.dumps(dict(zip(columns, entry, strict=True))) + "\n" for entry in rows_of_sets]
    (folder / "test.jsonl").write_text("".join(lines))
    documents = [
        {"id": str(number), "contents": f"{question}\n{answers}"}
        for number, (_, question, answers) in enumerate(rows_of_sets)
    ]
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps(document) + "\n" for document in documents[::40])
    )
    config = SearchConfig(
        data=folder, eval_split="test", corpus=folder / "corpus.jsonl", max_turns=4
    )
    return rows_of_sets, SearchFactory(config, RunConfig())


def test_real_questions_are_loaded_as_they_are_and_scored_by_set(questions):
    expected, factory = questions
    tasks = eval_tasks(factory, "test", 0, 0)
    assert len(tasks) == len(expected) == 3610 + 7405
    for task, (source, question, answers) in zip(tasks, expected, strict=True):
        assert task.kind == source
        assert task.payload.text == question.strip()
        assert task.payload.answers == ((answers,) if isinstance(answers, str) else tuple(answers))
    environment = factory.make()
    played = []
    for number, task in enumerate(tasks):
        environment.reset(task)
        answer = task.payload.answers[-1] if number % 2 else "I do not know."
        outcome = environment.step(environment.format_action(f"answer[{answer}]"))
        assert outcome.done, (task, outcome)
        assert outcome.valid, (task, outcome)
        assert outcome.won == bool(number % 2), (task, outcome)
        played.append((task.kind, outcome.won))
    rows_by_set = kind_rows(played)
    assert {name: row.get("games") for name, row in rows_by_set.items()} == {
        "NQ": 3610,
        "HotpotQA": 7405,
        "Avg.": None,
    }
    assert rows_by_set["NQ"]["success"] == 0.5
    assert rows_by_set["HotpotQA"]["success"] == 3702 / 7405
    assert rows_by_set["Avg."]["success"] == fmean(
        rows_by_set[name]["success"] for name in ("NQ", "HotpotQA")
    )


def test_a_real_question_finds_its_document(questions):
    _, factory = questions
    environment = factory.make()
    are_found = []
    for task in eval_tasks(factory, "test", 0, 0)[::400]:
        environment.reset(task)
        outcome = environment.step(environment.format_action(f"search[{task.payload.text}]"))
        are_found.append(
            task.payload.answers[0] in outcome.observation
            and outcome.observation in environment.context()
        )
    assert sum(are_found) >= len(are_found) - 1


@pytest.mark.slow
def test_tau2s_retail_tasks_are_won_by_their_own_calls():
    """Needs `PAW_TAU2_PYTHON`, an interpreter with tau2-bench, and `TAU2_DATA_DIR`, the folder
    "data" of its repository."""
    python = os.environ.get("PAW_TAU2_PYTHON")
    data_folder = os.environ.get("TAU2_DATA_DIR")
    if not (python and data_folder):
        pytest.skip("tau2-bench needs Python 3.12: set PAW_TAU2_PYTHON and TAU2_DATA_DIR")
    script = Path(__file__).with_name("tau2_real.py")
    paths = os.pathsep.join(
        map(str, (Path(__file__).parents[2], Path(__file__).parents[2] / "kernels"))
    )
    variables = {**os.environ, "PYTHONPATH": paths}
    finished = subprocess.run(
        [python, script, "retail"], env=variables, capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    *tasks, fingerprint = map(json.loads, finished.stdout.splitlines())
    assert len(tasks) == 114 == len({task["task"] for task in tasks})
    assert fingerprint.startswith("tau2 ")
    played = [task for task in tasks if not task["judged"]]
    assert len(played) == 74
    assert sum(task["incomplete"] for task in played) >= 5
    for task in played:
        assert task["first"] == "user: Hello, I need help."
        assert task["last"] == "user: ###STOP###"
        assert task["done"]
        assert task["tool"]
        assert task["seen"]
        assert task["won"] == (not task["incomplete"]) == (task["reward"] > 0), task
