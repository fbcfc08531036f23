"""Tasks are pure functions that never mix splits; every bad folder is one line that names it."""

import argparse
import importlib.util
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from paw.config import Config, ModelConfig
from paw.envs import make_factory
from paw.envs.alfworld import generator, index
from paw.envs.alfworld.factory import AlfworldFactory
from paw.envs.alfworld.problem import Game
from paw.envs.base import ENDLESS_EVAL, admissible_responses, eval_tasks, train_tasks, warmup_tasks
from paw.envs.settings import AlfworldConfig
from paw.errors import UserError
from paw.tools import data

OFFICIAL = Path(__file__).parents[3] / "shared" / "data" / "alfworld"
HAS_TEXTWORLD = importlib.util.find_spec("alfworld") and importlib.util.find_spec("textworld")


ABSOLUTE = '{"train": {"stamp": "x", "digest": "y", "games": [["/etc/a/b", "pick"]]}}'


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


def test_generated_tasks_are_pure_and_distinct():
    first = factory(difficulty="tiny")
    tasks = train_tasks(first, 3, 4, seed=1)
    again = train_tasks(factory(difficulty="tiny"), 3, 4, seed=1)
    assert [(t.id, t.kind, t.payload.scene) for t in tasks] == [(t.id, t.kind, t.payload.scene) for t in again]
    assert {t.id for t in tasks}.isdisjoint(t.id for t in train_tasks(first, 4, 4, seed=1))
    assert tasks[0].payload.scene != train_tasks(first, 3, 4, seed=2)[0].payload.scene
    assert warmup_tasks(first, 10, 3, seed=0)[1].id == warmup_tasks(first, 11, 1, seed=0)[0].id
    assert [t.id for t in train_tasks(first, 0, 8, seed=1)] == [
        t.id for step in range(4) for t in train_tasks(first, step, 2, seed=1)
    ]


def test_generated_splits_share_no_game():
    games = factory(difficulty="tiny")
    streams = [
        train_tasks(games, 0, 300, seed=0) + train_tasks(games, 0, 100, seed=5),
        warmup_tasks(games, 0, 300, seed=0),
        eval_tasks(games, "valid_unseen", 0, seed=0),
    ]
    assert len(streams[2]) == ENDLESS_EVAL
    contents = [{task.payload.scene.content() for task in tasks} for tasks in streams]
    assert not contents[0] & contents[1] and not contents[0] & contents[2] and not contents[1] & contents[2]


def test_generated_kinds():
    assert {t.kind for t in train_tasks(factory(difficulty="tiny"), 0, 60, seed=0)} == {
        *("pick", "look", "clean", "heat", "cool")  # the default is whatever the difficulty offers
    }
    assert {t.kind for t in train_tasks(factory(difficulty="small", kinds=["two", "heat"]), 0, 20, seed=0)} == {
        *("two", "heat")
    }
    with pytest.raises(UserError, match='"two" is not offered by difficulty "tiny"'):
        factory(difficulty="tiny", kinds=["two"])
    with pytest.raises(UserError, match=r"env\.kinds is empty"):
        factory(kinds=[])


def test_generated_evaluation_needs_a_held_out_split():
    for split in ("train", "valid_seen", "nonsense"):
        with pytest.raises(UserError, match=f"no split '{split}' to evaluate on; use 'valid_unseen'"):
            factory(difficulty="tiny", eval_split=split)
    with pytest.raises(UserError, match="no split 'valid_seen'; use 'valid_unseen', or set"):
        eval_tasks(factory(difficulty="tiny"), "valid_seen", 4, seed=0)
    with pytest.raises(UserError, match=r"env\.train_split = 'valid_seen' needs env\.data"):
        factory(difficulty="tiny", train_split="valid_seen")


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
    (folder / "json_2.1.1" / index.INDEX).unlink()
    assert factory(data=folder).fingerprint() != prints[3]


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


def test_training_goes_through_the_files_once_an_epoch(folder: Path):
    games = factory(data=folder)
    ids = [t.id for step in range(7) for t in train_tasks(games, step, 3, seed=0)]  # 21 tasks: three epochs of 7
    for epoch in range(3):
        assert len(set(ids[7 * epoch : 7 * epoch + 7])) == 7
    assert ids[:7] != ids[7:14]
    assert ids == [t.id for t in train_tasks(factory(data=folder / "json_2.1.1"), 0, 21, seed=0)]
    assert ids != [t.id for t in train_tasks(games, 0, 21, seed=1)]
    assert all(task_id.startswith("train/") for task_id in ids)


def test_a_group_of_one_task_shares_the_parsed_game(folder: Path):
    games = factory(data=folder)
    assert train_tasks(games, 0, 1, seed=0)[0].payload is train_tasks(games, 0, 1, seed=0)[0].payload


def test_evaluation_draws_or_the_whole_split(folder: Path):
    games = factory(data=folder)
    whole = [t.id for t in eval_tasks(games, "valid_unseen", 0, seed=9)]
    assert len(whole) == len(set(whole)) == 5
    assert whole == sorted(whole)
    drawn = [t.id for t in eval_tasks(games, "valid_unseen", 40, seed=9)]
    assert drawn == [t.id for t in eval_tasks(factory(data=folder), "valid_unseen", 40, seed=9)]
    assert drawn != [t.id for t in eval_tasks(games, "valid_unseen", 40, seed=8)]
    assert set(drawn) <= set(whole) and max(Counter(drawn).values()) > 1


def test_the_index_saves_the_scan_and_sees_new_games(folder: Path, monkeypatch):
    factory(data=folder).fingerprint()
    assert set(json.loads((folder / "json_2.1.1" / index.INDEX).read_text())) == {"train", "valid_unseen"}

    def scanned(root: Path, split: str):
        raise AssertionError(f"{split} was scanned again")

    with monkeypatch.context() as patch:
        patch.setattr(index, "_scan", scanned)
        assert len(eval_tasks(factory(data=folder), "valid_unseen", 0, seed=0)) == 5
    for game in generator.games("unseen", 5, 2, seed=4, difficulty="tiny"):
        generator.write(game, folder / "json_2.1.1" / "valid_unseen")
    assert len(eval_tasks(factory(data=folder), "valid_unseen", 0, seed=0)) == 7


@pytest.mark.parametrize("content", ["", "[]", '{"train": 3}', '{"valid_unseen": {"stamp": "x"}}', ABSOLUTE, "\udcff"])
def test_a_damaged_index_is_made_anew(folder: Path, content: str):
    (folder / "json_2.1.1" / index.INDEX).write_bytes(content.encode(errors="surrogateescape"))
    assert len(eval_tasks(factory(data=folder), "valid_unseen", 0, seed=0)) == 5


def test_read_only_data_is_indexed_in_the_cache(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PAW_CACHE", str(tmp_path / "cache"))
    (folder / "json_2.1.1" / index.INDEX).mkdir()  # stands for a folder nothing can be written to, as root can
    factory(data=folder)
    assert len(list((tmp_path / "cache").glob("alfworld-*.json"))) == 1
    assert not list((folder / "json_2.1.1").glob("*.tmp"))


def test_kinds_select_games(folder: Path):
    every = {t.kind for t in train_tasks(factory(data=folder), 0, 7, seed=0)}
    some = sorted(every)[0]
    only = factory(data=folder, kinds=[some], eval_split="train")
    assert {t.kind for t in train_tasks(only, 0, 7, seed=0)} == {some}
    with pytest.raises(UserError, match=r"holds no game of env\.kinds = \['two'\]"):
        factory(data=folder, kinds=["two"])


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda d: shutil.rmtree(d), r"env\.data: .*/data is no folder .*paw data alfworld --download"),
        (lambda d: shutil.rmtree(d / "json_2.1.1"), r"env\.data: .*/data holds no ALFWorld games"),
        (lambda d: shutil.rmtree(d / "json_2.1.1" / "valid_unseen"), r"no split 'valid_unseen' \(it has: train\)"),
        (
            lambda d: [p.unlink() for p in d.glob("json_2.1.1/valid_unseen/*/*/game.tw-pddl")],
            r"/valid_unseen holds no games .*paw data alfworld --download",
        ),
        (
            lambda d: [p.write_text("{") for p in d.glob("json_2.1.1/valid_unseen/*/*/game.tw-pddl")],
            r"game file .*game\.tw-pddl: not valid JSON",
        ),
        (
            lambda d: [p.write_text('{"solvable": false}') for p in d.glob("json_2.1.1/valid_unseen/*/*/*.tw-pddl")],
            "holds no games",
        ),
        (
            lambda d: [p.write_bytes(b"\xff\xfe") for p in d.glob("json_2.1.1/valid_unseen/*/*/game.tw-pddl")],
            r"game file .*game\.tw-pddl",
        ),
    ],
    ids=["no folder", "no games", "no split", "empty split", "cut off", "unsolvable", "not text"],
)
def test_bad_data_is_one_line(folder: Path, breakage, message: str):
    breakage(folder)
    with pytest.raises(UserError, match=message) as caught:
        eval_tasks(factory(data=folder), "valid_unseen", 0, seed=0)
    assert "\n" not in str(caught.value)


def test_a_game_that_vanishes_after_indexing_is_named(folder: Path):
    games = factory(data=folder)
    for path in folder.glob("json_2.1.1/valid_unseen/*/*/game.tw-pddl"):
        path.unlink()
    with pytest.raises(UserError, match=r"game\.tw-pddl: cannot be read: No such file"):
        eval_tasks(games, "valid_unseen", 0, seed=0)


def test_unknown_splits(folder: Path):
    with pytest.raises(UserError, match="unknown ALFWorld split 'valid'; there are: train, valid_train"):
        factory(data=folder, eval_split="valid")
    with pytest.raises(UserError, match=r"unknown ALFWorld split '\.\./train'"):
        train_tasks(factory(data=folder), 0, 1, seed=0, split="../train")


def test_official_games(tmp_path: Path):
    if not OFFICIAL.is_dir():
        pytest.skip("the official games (../shared/data/alfworld) are not here")
    root = _unpack(tmp_path, per_split=6)
    games = factory(data=tmp_path, eval_split="valid_seen")
    assert not list(root.glob("valid_unseen"))
    tasks = train_tasks(games, 0, 6, seed=0) + eval_tasks(games, "valid_seen", 0, seed=0)
    environment = games.make()
    for task in tasks:
        environment.reset(task)
        outcome = None
        for command in task.payload.walkthrough:
            assert f"'{command}'" in environment.context()
            outcome = environment.step(f"<think>walkthrough</think><action>{command}</action>")
        assert outcome is not None and outcome.won and outcome.reward == 10.0
        assert task.id.split("/")[1].startswith({v: k for k, v in index.KIND_OF_TYPE.items()}[task.kind])


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TEXTWORLD, reason="needs the alfworld extra")
def test_the_real_engine_in_a_worker_says_the_same(tmp_path: Path):
    if not OFFICIAL.is_dir():
        pytest.skip("the official games (../shared/data/alfworld) are not here")
    _unpack(tmp_path, per_split=1)
    real = factory(data=tmp_path, eval_split="valid_seen", backend="textworld")
    generated = factory(difficulty="tiny", backend="textworld")
    mine, theirs = factory(difficulty="tiny").make(), real.make()
    for task in eval_tasks(real, "valid_seen", 1, seed=0) + train_tasks(generated, 0, 2, seed=0):
        assert theirs.reset(task) == mine.reset(task)
        outcome = None
        for command in ["fly", *(task.payload.walkthrough)]:
            assert theirs.context() == mine.context()
            assert theirs.oracle() == mine.oracle()
            response = f"<think>walkthrough</think><action>{command}</action>"
            outcome = theirs.step(response)
            assert outcome == mine.step(response)
        assert outcome is not None and outcome.won
    theirs.close()
    assert "textworld" in real.fingerprint()


@pytest.mark.skipif(bool(HAS_TEXTWORLD), reason="alfworld is installed")
def test_a_missing_engine_names_the_extra():
    with pytest.raises(UserError, match=r"pip install 'paw-trainer\[alfworld\]'"):
        factory(backend="textworld")


# ---- paw data


def data_command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args(["alfworld", *words]))


def test_data_generates_a_folder_to_train_on(tmp_path: Path, capsys):
    out = tmp_path / "games"
    assert data_command("--generate", "12", "--out", str(out), "--difficulty", "tiny") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train           12 games (")
    assert lines[1].startswith("valid_unseen     1 games (")
    assert lines[-1] == f"use them with --env.data {out}"
    games = make_factory(Config(model=ModelConfig(path="-"), env=AlfworldConfig(data=out)))
    contents = [
        {_content(task.payload) for task in tasks}
        for tasks in (train_tasks(games, 0, 12, 0), eval_tasks(games, "valid_unseen", 0, 0))
    ]
    assert not contents[0] & contents[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--generate", "3"], "--out DIR"),
        (["--generate", "0", "--out", "x"], "from 1 on"),
        (["--out", "x"], "--out belongs to --generate"),
        (["--dir", "/nonexistent"], "is no folder"),
        (["--generate", "3", "--out", "/dev/null/x", "--difficulty", "tiny"], "cannot be written"),
    ],
)
def test_data_mistakes(words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        data_command(*words)


def test_data_download_runs_the_packages_own_command(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match=r"not installed: pip install 'paw-trainer\[alfworld\]'"):
        data_command("--download", "--dir", str(tmp_path / "games"))
    script = tmp_path / "bin" / "alfworld-download"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\n[ "$1" = --data-dir ] && exit 7\n')
    script.chmod(0o755)
    with pytest.raises(UserError, match="alfworld-download failed with exit code 7"):
        data_command("--download", "--dir", str(tmp_path / "games"))


def _content(game: Game) -> tuple:
    """What a game that was read asks of which room: its types, as ids and numbers differ."""
    room = sorted(
        (game.receptacle_type[r], *sorted(game.object_type[o] for o in game.contents[r])) for r in game.location
    )
    return (game.goal, tuple(room))


def _unpack(folder: Path, *, per_split: int) -> Path:
    """The first official games of each split, in `folder`/json_2.1.1."""
    spec = importlib.util.spec_from_file_location("unpack", OFFICIAL / "unpack.py")
    assert spec is not None and spec.loader is not None
    unpack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unpack)
    seen: Counter[str] = Counter()
    for game_id, game in unpack.games(OFFICIAL / "games.jsonl.xz"):
        split = game_id.split("/")[0]
        seen[split] += 1
        if seen[split] <= per_split:
            path = folder / "json_2.1.1" / game_id / index.GAME_FILE
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(game))
    return folder / "json_2.1.1"
