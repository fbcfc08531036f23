"""ALFWorld's tasks are pure functions, and splits share none. The prompts are the paper's, letter by
letter."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from paw.envs.alfworld import generator, index
from paw.envs.alfworld.factory import AlfworldFactory
from paw.envs.alfworld.prompt import CompactStyle, PaperStyle
from paw.envs.base import admissible_responses, eval_tasks, train_tasks
from paw.envs.settings import AlfworldConfig
from paw.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PAW_CACHE", str(tmp_path_factory.mktemp("cache")))


def factory(**settings) -> AlfworldFactory:
    return AlfworldFactory(AlfworldConfig(**settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Generated games in ALFWorld's layout: 7 for training, 5 unseen."""
    games_folder = tmp_path / "data" / "json_2.1.1"
    for split, stream, count in (("train", "train", 7), ("valid_unseen", "unseen", 5)):
        for game in generator.games(stream, 0, count, seed=4, difficulty="tiny"):
            generator.write(game, games_folder / split)
    return games_folder.parent


# ---- generated games


def test_fingerprints_tell_games_apart(folder: Path):
    tiny_games = factory(difficulty="tiny").fingerprint()
    # The same with any hash seed.
    assert tiny_games == "generated tiny pick,look,clean,heat,cool 07ae69029a62b388"
    assert (
        factory(difficulty="full").fingerprint()
        == "generated full pick,look,clean,heat,cool,two 5fd1b4c7fce13577"
    )
    assert tiny_games == factory(difficulty="tiny", max_turns=3, style="compact").fingerprint()
    small_games, heat_games = (
        factory(difficulty="small", **kinds).fingerprint() for kinds in ({}, {"kinds": ["heat"]})
    )
    games_of_files = factory(data=folder).fingerprint()
    assert len({tiny_games, small_games, heat_games, games_of_files}) == 4
    assert games_of_files.startswith("alfworld train ")
    path = next(folder.glob("json_2.1.1/valid_unseen/*/*/game.tw-pddl"))
    path.write_text(path.read_text() + " ")
    path.parent.parent.rename(path.parent.parent.with_name("pick_and_place_simple-other"))
    assert factory(data=folder).fingerprint() != games_of_files


def test_kinds_and_splits_that_are_not_generated_and_an_engine_that_is_not_installed(monkeypatch):
    games = factory(difficulty="small", kinds=["two", "heat"])
    assert {task.kind for task in train_tasks(games, 0, 20, seed=0)} == {"two", "heat"}
    for settings, message in (
        ({"kinds": ["two"]}, '"two" is not offered by difficulty "tiny"'),
        ({"kinds": []}, r"env\.kinds is empty"),
        ({"eval_split": "train"}, "no split 'train' to evaluate on; use 'valid_unseen'"),
        ({"train_split": "valid_seen"}, r"env\.train_split = 'valid_seen' needs env\.data"),
    ):
        with pytest.raises(UserError, match=message):
            factory(difficulty="tiny", **settings)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"needs the package textworld: pip install 'paw-trainer\[alfworld\]'"
    ):
        factory(backend="textworld")
    with pytest.raises(UserError, match="no split 'valid_seen'; use 'valid_unseen', or set"):
        eval_tasks(games, "valid_seen", 4, seed=0)


# ---- episodes


@pytest.mark.parametrize(
    "settings",
    [{"style": "paper"}, {"style": "paper", "think": False}, {"style": "compact", "history": 3}],
)
def test_the_expert_wins_in_the_style_asked_for(settings: dict):
    games = factory(difficulty="tiny", reward=5.0, **settings)
    environment = games.make()
    for task in train_tasks(games, 0, 8, seed=0):
        environment.reset(task)
        outcome = None
        while outcome is None or not outcome.done:
            response = environment.oracle()
            assert response in admissible_responses(environment)
            outcome = environment.step(response)
            assert outcome.valid
            assert outcome.reward == (5.0 if outcome.won else 0.0)
        assert outcome.won


def test_an_episode_ends_after_max_turns_and_nonsense_does_nothing():
    games = factory(difficulty="tiny", max_turns=2, style="compact")
    environment = games.make()
    environment.reset(train_tasks(games, 0, 1, seed=0)[0])
    first_outcome = environment.step("dance\n")
    assert first_outcome.observation == "Nothing happens."
    assert first_outcome.action == "dance"
    assert first_outcome.valid is False
    assert first_outcome.done is False
    assert "did:\ndance\nsee:\nNothing happens." in environment.context()
    second = environment.step("look")
    assert second.valid is True
    assert second.done is True
    assert second.won is False
    assert second.reward == 0.0


# ---- games from files


def test_training_goes_through_the_files_and_evaluation_draws(folder: Path):
    games = factory(data=folder)
    same_games = factory(data=folder / "json_2.1.1")
    ids = []
    for step in range(7):  # 21 tasks: three epochs of 7
        ids += [task.id for task in train_tasks(games, step, 3, seed=0)]
    assert len(set(ids[:7])) == 7
    assert len(set(ids[7:14])) == 7
    assert len(set(ids[14:])) == 7
    assert ids[:7] != ids[7:14]
    assert ids == [task.id for task in train_tasks(same_games, 0, 21, seed=0)]
    assert (
        train_tasks(games, 0, 1, seed=0)[0].payload is train_tasks(games, 0, 1, seed=0)[0].payload
    )
    all_ids = [task.id for task in eval_tasks(games, "valid_unseen", 0, seed=9)]
    assert len(all_ids) == 5
    assert len(set(all_ids)) == 5
    assert all_ids == sorted(all_ids)

    def draw(games, seed):
        return [task.id for task in eval_tasks(games, "valid_unseen", 40, seed=seed)]

    drawn_tasks = draw(games, seed=9)
    assert {*drawn_tasks} <= {*all_ids}
    assert max(Counter(drawn_tasks).values()) > 1
    assert drawn_tasks == draw(same_games, seed=9)
    assert drawn_tasks != draw(games, seed=8)
    kind = sorted({task.kind for task in train_tasks(games, 0, 7, seed=0)})[0]
    one_kind = factory(data=folder, kinds=[kind], eval_split="train")
    assert {task.kind for task in train_tasks(one_kind, 0, 7, seed=0)} == {kind}


def test_the_index_saves_the_scan_and_sees_new_games(folder: Path, monkeypatch):
    factory(data=folder).fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(index, "_scan", lambda root, split: pytest.fail(f"{split} was scanned again"))
        assert len(eval_tasks(factory(data=folder), "valid_unseen", 0, seed=0)) == 5
    for game in generator.games("unseen", 5, 2, seed=4, difficulty="tiny"):
        generator.write(game, folder / "json_2.1.1" / "valid_unseen")
    # If the cache cannot be written, the folder is scanned again.
    monkeypatch.setenv("PAW_CACHE", "/dev/null/nowhere")
    assert len(eval_tasks(factory(data=folder), "valid_unseen", 0, seed=0)) == 7
    games = factory(data=folder, eval_split="train")
    for path in folder.glob("json_2.1.1/train/*/*/game.tw-pddl"):
        path.unlink()
    with pytest.raises(UserError, match=r"game\.tw-pddl: cannot be read: No such file"):
        eval_tasks(games, "train", 0, seed=1)


def test_bad_data_is_one_line(folder: Path):
    def refused(message: str, split: str = "valid_unseen", **settings) -> None:
        with pytest.raises(UserError, match=message) as caught:
            train_tasks(factory(data=folder, **settings), 0, 1, seed=0, split=split)
        assert "\n" not in str(caught.value)

    refused("unknown ALFWorld split 'valid'; there are: train, valid_train", eval_split="valid")
    refused(r"unknown ALFWorld split '\.\./train'", split="../train")
    refused(r"holds no game of env\.kinds = \['two'\]", kinds=["two"])
    game_files = list(folder.glob("json_2.1.1/valid_unseen/*/*/game.tw-pddl"))
    no_games = r"/valid_unseen holds no games .*paw data alfworld --download"
    cut_off = r"game file .*game\.tw-pddl: Invalid JSON.*download the games again"
    for content, message in (("{", cut_off), ('{"solvable": false}', no_games)):
        for path in game_files:
            path.write_text(content)
            path.parent.parent.touch()  # like a folder whose games have changed
        refused(message)
    for path in game_files:
        path.unlink()
    refused(no_games)
    for removed, message in (
        (folder / "json_2.1.1" / "valid_unseen", r"no split 'valid_unseen' \(it has: train\)"),
        (folder / "json_2.1.1", r"env\.data: .*/data holds no ALFWorld games"),
        (folder, r"env\.data: .*/data is not a folder .*paw data alfworld --download"),
    ):
        shutil.rmtree(removed)
        refused(message)


# ---- prompts

OPENING = (
    "-= Welcome to TextWorld, ALFRED! =-\n\n"
    "You are in the middle of a room. Looking quickly around you, you see a drawer 1, and a shelf 1.\n\n"
    "Your task is to: put a mug in shelf."
)
ADMISSIBLE = ["go to drawer 1", "go to shelf 1", "inventory", "look"]
TASK = "put a mug in shelf."
FIRST = (TASK, [], OPENING, ADMISSIBLE)
PAST = [(OPENING, "go to drawer 1"), ("The drawer 1 is closed.", "fly")]
THIRD = (TASK, PAST, "Nothing happens.", ["look", "open drawer 1"])


def test_paper_first_turn():
    assert PaperStyle().prompt(*FIRST) == (
        "\n"
        "You are an expert agent operating in the ALFRED Embodied Environment.\n"
        "Your current observation is: -= Welcome to TextWorld, ALFRED! =-\n"
        "\n"
        "You are in the middle of a room. Looking quickly around you, you see a drawer 1, and a shelf 1.\n"
        "\n"
        "Your task is to: put a mug in shelf.\n"
        "Your admissible actions of the current situation are: ['go to drawer 1'\n"
        " 'go to shelf 1'\n"
        " 'inventory'\n"
        " 'look'].\n"
        "\n"
        "Now it's your turn to take an action.\n"
        "You should first reason step-by-step about the current situation. This reasoning process MUST be enclosed "
        "within <think> </think> tags. \n"
        "Once you've finished your reasoning, you should choose an admissible action for current step and present it "
        "within <action> </action> tags.\n"
    )


def test_paper_later_turn():
    assert PaperStyle(history=1, think=False).prompt(*THIRD) == (
        "\n"
        "You are an expert agent operating in the ALFRED Embodied Environment. Your task is to: put a mug in shelf.\n"
        "Prior to this step, you have already taken 2 step(s). Below are the most recent 1 observations and the "
        "corresponding actions you took: [Observation 2: 'The drawer 1 is closed.', Action 2: 'fly']\n"
        "You are now at step 3 and your current observation is: Nothing happens.\n"
        "Your admissible actions of the current situation are: ['look'\n"
        " 'open drawer 1'].\n"
        "\n"
        "Now it's your turn to take an action.\n"
        "You should choose an admissible action for current step and present it within <action> </action> tags.\n"
    )

    past_turns = [(f"see {i}", f"do {i}") for i in range(1, 5)]
    # Braces in game text are left alone.
    prompt = PaperStyle().prompt("{task} {0}", past_turns, "{z}", ["look"])
    history = "[Observation 3: 'see 3', Action 3: 'do 3']\n[Observation 4: 'see 4', Action 4: 'do 4']\nYou are now"
    assert history in prompt
    assert "{task} {0}" in prompt
    assert "{z}" in prompt
    assert "already taken 4 step(s). Below are the most recent 2 observations" in prompt
    without = PaperStyle(history=0).prompt(*THIRD)
    assert "Your task is to: put a mug in shelf." in without
    assert "[Observation" not in without


def test_compact_prompts():
    style = CompactStyle(history=1)
    assert style.prompt(*FIRST) == (
        "task: put a mug in shelf.\n"
        "see:\n"
        "You are in the middle of a room. Looking quickly around you, you see a drawer 1, and a shelf 1.\n"
        "can:\n"
        "go to drawer 1\n"
        "go to shelf 1\n"
        "inventory\n"
        "look"
    )
    assert style.prompt(*THIRD) == (
        "task: put a mug in shelf.\ndid:\nfly\nsee:\nNothing happens.\ncan:\nlook\nopen drawer 1"
    )
    assert "did:" not in CompactStyle(history=0).prompt(*THIRD)


def test_paper_projection():
    for response, action, valid in (
        ("<think>a</think>\n<ACTION>\n Open Drawer 1 \n</ACTION>", "open drawer 1", True),
        # Not admissible, but well-formed.
        ("<think>a</think><action>dance</action><action>help</action>", "dance", True),
        # The reference requires both tags, in any order.
        ("<action>look</action></think><think>", "look", True),
        ("<action>look</action>", "look", False),
        ("<THINK>a</THINK><action>look</action>", "look", False),
        ("<think>a</think><action>look 看</action>", "look 看", False),
        ("<think>\u3042 \ua000</think><action>look</action>", "look", True),
        ("<think>a</think><action>look", "<think>a</think><action>look"[-30:], False),
        ("", "", False),
        # Closed before it opens, so nothing is between the tags, as in the reference.
        ("<think>a</think></action><action>look", "", True),
        (
            "I would rather GO TO the shelf 1 now, please",
            "er go to the shelf 1 now, please"[-30:],
            False,
        ),
    ):
        assert PaperStyle().parse_action(response, ADMISSIBLE) == (action, valid)
        well_formed = valid or response.lower().endswith("<action>look</action>")
        assert PaperStyle(think=False).parse_action(response, []) == (action, well_formed)
    assert PaperStyle().parse_action("<think>\u9fff</think><action>look</action>", []) == (
        "look",
        False,
    )


def test_compact_projection_and_own_answers():
    style = CompactStyle()
    assert style.parse_action("  Go To Shelf 1\n", ADMISSIBLE) == ("go to shelf 1", True)
    for response in ("help", "go to shelf 2", "<action>look</action>", ""):
        assert style.parse_action(response, ADMISSIBLE) == (response, False)
    for style in (PaperStyle(), PaperStyle(think=False), CompactStyle()):
        assert style.parse_action(style.format_action("go to shelf 1"), ADMISSIBLE) == (
            "go to shelf 1",
            True,
        )
