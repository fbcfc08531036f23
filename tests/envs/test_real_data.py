"""Environments on the public files they were made for, where these are at hand (../shared/data): nothing is generated.

ALFWorld's official games are in test_alfworld_factory.py, the paper's tables in test_recipes.py.
"""

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
    held_out, train = factory.tasks("test", 0), factory.tasks("train", 0)
    assert (len(factory.catalogue.products), len(held_out), len(train)) == (100, 125, 376)
    assert not {task.id for task in held_out} & {task.id for task in train}
    environment, scores, unmet = factory.make(), [], set()
    for task in [*held_out, *train]:
        goal = task.payload.goal
        environment.reset(task)
        while True:
            prompt, said = environment.context(), environment.step(environment.oracle())
            assert goal.instruction.strip() in prompt and said.valid
            if said.done:
                break
        scores.append(said.score)
        assert said.won == (said.score == 1.0) and (said.reward > 0) == said.won
        if not said.won:
            unmet.add(goal.product.asin)
            # All was chosen as asked.
            assert {*environment.session.options.values()} == {*goal.options.values()}
    # The score of WebShop itself: it takes "green2" for "green", "antique graywash" for "gray",
    # "dash kit" for "dash".
    assert unmet == {"B07MGB73NJ", "B08QRHVS6N", "B09B7G7P58"}
    assert sum(score == 1.0 for score in scores) == 480 and min(scores) >= 2 / 3


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """NQ's and HotpotQA's development questions as a test set in the form of Search-R1's, and a factory of them."""
    nq, hotpot = (
        at_hand("search/nq_open_dev.jsonl.gz"),
        at_hand("search/hotpot_dev_v1_simplified.json.gz"),
    )
    folder = tmp_path_factory.mktemp("qa")
    lines = gzip.decompress(nq.read_bytes()).decode().splitlines()
    found = [("nq", *json.loads(line).values()) for line in lines]
    found += [
        ("hotpotqa", row["question"], row["answer"])
        for row in json.loads(gzip.decompress(hotpot.read_bytes()))
    ]
    columns = ("data_source", "question", "golden_answers")
    lines = [json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in found]
    (folder / "test.jsonl").write_text("".join(lines))
    documents = [
        {"id": str(i), "contents": f"{question}\n{answers}"}
        for i, (_, question, answers) in enumerate(found)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(of) + "\n" for of in documents[::40]))
    config = SearchConfig(
        data=folder, eval_split="test", corpus=folder / "corpus.jsonl", max_turns=4
    )
    return found, SearchFactory(config, RunConfig())


def test_real_questions_are_loaded_as_they_are_and_scored_by_set(questions):
    found, factory = questions
    tasks = eval_tasks(factory, "test", 0, 0)
    assert len(tasks) == len(found) == 3610 + 7405
    for task, (source, question, answers) in zip(tasks, found, strict=True):
        assert (task.kind, task.payload.text) == (source, question.strip())
        assert task.payload.answers == ((answers,) if isinstance(answers, str) else tuple(answers))
    environment, played = factory.make(), []
    for i, task in enumerate(tasks):
        environment.reset(task)
        answer = task.payload.answers[-1] if i % 2 else "I do not know."
        said = environment.step(environment.format_action(f"answer[{answer}]"))
        assert said.done and said.valid and said.won == bool(i % 2), (task, said)
        played.append((task.kind, said.won))
    table = kind_rows(played)
    assert {name: row.get("games") for name, row in table.items()} == {
        "NQ": 3610,
        "HotpotQA": 7405,
        "Avg.": None,
    }
    assert table["NQ"]["success"] == 0.5 and table["HotpotQA"]["success"] == 3702 / 7405
    assert table["Avg."]["success"] == fmean(table[name]["success"] for name in ("NQ", "HotpotQA"))


def test_a_real_question_finds_its_document(questions):
    _, factory = questions
    environment, hits = factory.make(), []
    for task in eval_tasks(factory, "test", 0, 0)[::400]:
        environment.reset(task)
        said = environment.step(environment.format_action(f"search[{task.payload.text}]"))
        hits.append(
            task.payload.answers[0] in said.observation
            and said.observation in environment.context()
        )
    assert sum(hits) >= len(hits) - 1


@pytest.mark.slow
def test_tau2s_retail_tasks_are_won_by_their_own_calls():
    """`PAW_TAU2_PYTHON`: an interpreter with tau2-bench; `TAU2_DATA_DIR`: the folder "data" of its repository."""
    python, data = os.environ.get("PAW_TAU2_PYTHON"), os.environ.get("TAU2_DATA_DIR")
    if not (python and data):
        pytest.skip("tau2-bench needs Python 3.12: set PAW_TAU2_PYTHON and TAU2_DATA_DIR")
    script = Path(__file__).with_name("tau2_real.py")
    paths = os.pathsep.join(
        map(str, (Path(__file__).parents[2], Path(__file__).parents[2] / "kernels"))
    )
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [python, script, "retail"], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *tasks, fingerprint = map(json.loads, done.stdout.splitlines())
    assert len(tasks) == 114 == len({task["task"] for task in tasks}) and fingerprint.startswith(
        "tau2 "
    )
    played = [task for task in tasks if not task["judged"]]
    assert len(played) == 74 and sum(task["incomplete"] for task in played) >= 5
    for task in played:
        assert (
            task["first"] == "user: Hello, I need help."
            and task["last"] == "user: ###STOP###"
            and task["done"]
        )
        assert task["tool"] and task["seen"]
        assert task["won"] == (not task["incomplete"]) == (task["reward"] > 0), task
