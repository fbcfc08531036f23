"""Tasks are pure functions that never mix splits; every bad folder is one line that names it."""

import importlib.util
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from paw.envs.alfworld import generator, index
from paw.envs.alfworld.factory import AlfworldFactory
from paw.envs.alfworld.problem import TASK_TYPES
from paw.envs.base import admissible_responses, eval_tasks, train_tasks
from paw.envs.settings import AlfworldConfig
from paw.errors import UserError

HAS_TEXTWORLD = importlib.util.find_spec("alfworld") and importlib.util.find_spec("textworld")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PAW_CACHE", str(tmp_path_factory.mktemp("cache")))


def factory(**settings) -> AlfworldFactory:
    return AlfworldFactory(AlfworldConfig(**settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Generated games in ALFWorld's layout: 7 for training, 5 unseen."""
    root = tmp_path / "data" / "json_2.1.1"
    for split, stream, count in (("train", "train", 7), ("valid_unseen", "unseen", 5)):
        for game in generator.games(stream, 0, count, seed=4, difficulty="tiny"):
            generator.write(game, root / split)
    return root.parent


# ---- generated games


def test_fingerprints_tell_games_apart(folder: Path):
    prints = [
        factory(difficulty="tiny").fingerprint(),
        factory(difficulty="small").fingerprint(),
        factory(difficulty="small", kinds=["heat"]).fingerprint(),
        factory(data=folder).fingerprint(),
    ]
    assert len(set(prints)) == 4
    assert prints[0] == factory(difficulty="tiny", max_turns=3, style="compact").fingerprint()
    assert prints[0].startswith("generated tiny ")
    assert prints[3].startswith("alfworld train ")
    path = next(folder.glob("json_2.1.1/valid_unseen/*/*/game.tw-pddl"))
    path.write_text(path.read_text() + " ")
    path.parent.parent.rename(path.parent.parent.with_name("pick_and_place_simple-other"))
    assert factory(data=folder).fingerprint() != prints[3]


def test_kinds_and_splits_that_are_not_generated():
    assert {t.kind for t in train_tasks(factory(difficulty="tiny"), 0, 60, seed=0)} == {
        *("pick", "look", "clean", "heat", "cool")  # the default is whatever the difficulty offers
    }
    games = factory(difficulty="small", kinds=["two", "heat"])
    assert {t.kind for t in train_tasks(games, 0, 20, seed=0)} == {"two", "heat"}
    for settings, message in (
        ({"kinds": ["two"]}, '"two" is not offered by difficulty "tiny"'),
        ({"kinds": []}, r"env\.kinds is empty"),
        ({"eval_split": "train"}, "no split 'train' to evaluate on; use 'valid_unseen'"),
        ({"train_split": "valid_seen"}, r"env\.train_split = 'valid_seen' needs env\.data"),
    ):
        with pytest.raises(UserError, match=message):
            factory(difficulty="tiny", **settings)
    with pytest.raises(UserError, match="no split 'valid_seen'; use 'valid_unseen', or set"):
        eval_tasks(games, "valid_seen", 4, seed=0)
    if not HAS_TEXTWORLD:
        with pytest.raises(UserError, match=r"pip install 'paw-trainer\[alfworld\]'"):
            factory(backend="textworld")


# ---- episodes


@pytest.mark.parametrize(
    "settings",
    [{"style": "paper"}, {"style": "paper", "think": False}, {"style": "compact", "history": 3}],
    ids=["think", "no-think", "compact"],
)
def test_the_expert_wins_in_the_style_asked_for(settings: dict):
    games = factory(difficulty="tiny", reward=5.0, **settings)
    environment = games.make()
    for task in train_tasks(games, 0, 8, seed=0):
        opening = environment.reset(task)
        assert environment.anchor() == opening
        outcome = None
        while outcome is None or not outcome.done:
            response = environment.oracle()
            assert response in admissible_responses(environment)
            outcome = environment.step(response)
            assert outcome.valid
            assert environment.anchor() == outcome.observation
            assert outcome.reward == (5.0 if outcome.won else 0.0)
        assert outcome.won


def test_an_episode_ends_after_max_turns_and_nonsense_does_nothing():
    games = factory(difficulty="tiny", max_turns=2, style="compact")
    environment = games.make()
    environment.reset(train_tasks(games, 0, 1, seed=0)[0])
    first = environment.step("dance\n")
    assert (first.observation, first.action, first.valid, first.done) == ("Nothing happens.", "dance", False, False)
    assert "did:\ndance\nsee:\nNothing happens." in environment.context()
    second = environment.step("look")
    assert (second.valid, second.done, second.won, second.reward) == (True, True, False, 0.0)


# ---- games from files


def test_training_goes_through_the_files_and_evaluation_draws(folder: Path):
    games, again = factory(data=folder), factory(data=folder / "json_2.1.1")
    ids = [t.id for step in range(7) for t in train_tasks(games, step, 3, seed=0)]  # 21 tasks: three epochs of 7
    assert len(set(ids[:7])) == len(set(ids[7:14])) == len(set(ids[14:])) == 7 and ids[:7] != ids[7:14]
    assert ids == [t.id for t in train_tasks(again, 0, 21, seed=0)] != [t.id for t in train_tasks(games, 0, 21, seed=1)]
    assert train_tasks(games, 0, 1, seed=0)[0].payload is train_tasks(games, 0, 1, seed=0)[0].payload
    whole = [t.id for t in eval_tasks(games, "valid_unseen", 0, seed=9)]
    assert len(whole) == len(set(whole)) == 5 and whole == sorted(whole)
    drawn = [t.id for t in eval_tasks(games, "valid_unseen", 40, seed=9)]
    assert drawn == [t.id for t in eval_tasks(again, "valid_unseen", 40, seed=9)]
    assert drawn != [t.id for t in eval_tasks(games, "valid_unseen", 40, seed=8)]
    assert set(drawn) <= set(whole) and max(Counter(drawn).values()) > 1
    some = sorted({t.kind for t in train_tasks(games, 0, 7, seed=0)})[0]
    only = factory(data=folder, kinds=[some], eval_split="train")
    assert {t.kind for t in train_tasks(only, 0, 7, seed=0)} == {some}


def test_the_index_saves_the_scan_and_sees_new_games(folder: Path, monkeypatch):
    factory(data=folder).fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(index, "_scan", lambda root, split: pytest.fail(f"{split} was scanned again"))
        assert len(eval_tasks(factory(data=folder), "valid_unseen", 0, seed=0)) == 5
    for game in generator.games("unseen", 5, 2, seed=4, difficulty="tiny"):
        generator.write(game, folder / "json_2.1.1" / "valid_unseen")
    monkeypatch.setenv("PAW_CACHE", "/dev/null/nowhere")  # a cache that cannot be written costs another scan
    games = factory(data=folder)
    assert len(eval_tasks(games, "valid_unseen", 0, seed=0)) == 7
    games = factory(data=folder, eval_split="train")
    for path in folder.glob("json_2.1.1/train/*/*/game.tw-pddl"):
        path.unlink()
    with pytest.raises(UserError, match=r"game\.tw-pddl: cannot be read: No such file"):
        eval_tasks(games, "train", 0, seed=1)


def games_of(data: Path) -> list[Path]:
    return list(data.glob("json_2.1.1/valid_unseen/*/*/game.tw-pddl"))


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda d: shutil.rmtree(d), r"env\.data: .*/data is no folder .*paw data alfworld --download"),
        (lambda d: shutil.rmtree(d / "json_2.1.1"), r"env\.data: .*/data holds no ALFWorld games"),
        (lambda d: shutil.rmtree(d / "json_2.1.1" / "valid_unseen"), r"no split 'valid_unseen' \(it has: train\)"),
        (lambda d: [p.unlink() for p in games_of(d)], r"/valid_unseen holds no games .*paw data alfworld --download"),
        (lambda d: [p.write_text("{") for p in games_of(d)], r"game file .*game\.tw-pddl: Invalid JSON"),
        (lambda d: [p.write_text('{"solvable": false}') for p in games_of(d)], "holds no games"),
    ],
    ids=["no folder", "no games", "no split", "empty split", "cut off", "unsolvable"],
)
def test_bad_data_is_one_line(folder: Path, breakage, message: str):
    breakage(folder)
    with pytest.raises(UserError, match=message) as caught:
        eval_tasks(factory(data=folder), "valid_unseen", 0, seed=0)
    assert "\n" not in str(caught.value)


def test_unknown_splits_and_kinds(folder: Path):
    with pytest.raises(UserError, match="unknown ALFWorld split 'valid'; there are: train, valid_train"):
        factory(data=folder, eval_split="valid")
    with pytest.raises(UserError, match=r"unknown ALFWorld split '\.\./train'"):
        train_tasks(factory(data=folder), 0, 1, seed=0, split="../train")
    with pytest.raises(UserError, match=r"holds no game of env\.kinds = \['two'\]"):
        factory(data=folder, kinds=["two"])


@pytest.fixture
def official(official_games, tmp_path: Path) -> Path:
    """A folder of the first six official games of each split."""
    seen: Counter[str] = Counter()
    for game_id, game in official_games():
        seen[split := game_id.split("/")[0]] += 1
        if seen[split] <= 6:
            path = tmp_path / "json_2.1.1" / game_id / index.GAME_FILE
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(game))
    return tmp_path


@pytest.mark.slow
def test_official_games_and_the_real_engine_in_a_worker_says_the_same(official: Path):
    games = factory(data=official, eval_split="valid_seen")
    tasks = train_tasks(games, 0, 6, seed=0) + eval_tasks(games, "valid_seen", 0, seed=0)
    real = factory(data=official, eval_split="valid_seen", backend="textworld") if HAS_TEXTWORLD else games
    mine, theirs = games.make(), real.make()
    generated = train_tasks(factory(difficulty="tiny"), 0, 2, seed=0)
    for task in [*tasks, *generated]:
        compared = HAS_TEXTWORLD and task in (*tasks[-1:], *generated)
        said = mine.reset(task)
        assert not compared or theirs.reset(task) == said
        outcome = None
        for command in ["fly", *task.payload.walkthrough]:
            assert command == "fly" or f"'{command}'" in mine.context()
            assert not compared or (theirs.context(), theirs.oracle()) == (mine.context(), mine.oracle())
            response = f"<think>walkthrough</think><action>{command}</action>"
            outcome = mine.step(response)
            assert not compared or theirs.step(response) == outcome
        assert outcome is not None and outcome.won and outcome.reward == 10.0
        assert task in generated or task.id.split("/")[1].startswith(TASK_TYPES[task.kind])
    theirs.close()
    assert not HAS_TEXTWORLD or "textworld" in real.fingerprint()
