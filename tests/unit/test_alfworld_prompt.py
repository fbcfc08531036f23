"""Prompts letter by letter, and the projection from a response to an action."""

import pytest

from paw.envs.alfworld.prompt import CompactStyle, PaperStyle, View, make_style, task_text

OPENING = (
    "-= Welcome to TextWorld, ALFRED! =-\n\n"
    "You are in the middle of a room. Looking quickly around you, you see a drawer 1, and a shelf 1.\n\n"
    "Your task is to: put a mug in shelf."
)
ADMISSIBLE = ["go to drawer 1", "go to shelf 1", "help", "inventory", "look"]
FIRST = View("put a mug in shelf.", [], OPENING, ADMISSIBLE)
THIRD = View(
    "put a mug in shelf.",
    [(OPENING, "go to drawer 1"), ("The drawer 1 is closed.", "fly")],
    "Nothing happens.",
    ["help", "look", "open drawer 1"],
)


def test_paper_first_turn():
    assert PaperStyle().prompt(FIRST) == (
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
    assert PaperStyle(history=1, think=False).prompt(THIRD) == (
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


def test_paper_history_is_the_last_two_numbered_from_one():
    past = [(f"see {i}", f"do {i}") for i in range(1, 5)]
    prompt = PaperStyle().prompt(View("t", past, "now", ["look"]))
    assert (
        "[Observation 3: 'see 3', Action 3: 'do 3']\n[Observation 4: 'see 4', Action 4: 'do 4']\nYou are now" in prompt
    )
    assert "see 2" not in prompt
    assert "already taken 4 step(s). Below are the most recent 2 observations" in prompt


def test_paper_without_history_still_names_the_task():
    prompt = PaperStyle(history=0).prompt(THIRD)
    assert "Your task is to: put a mug in shelf." in prompt
    assert "[Observation" not in prompt


def test_braces_in_game_text_are_left_alone():
    assert "{task} {0}" in PaperStyle().prompt(View("{task} {0}", [("{x}", "{y}")], "{z}", ["look"]))


def test_compact_prompts():
    style = CompactStyle(history=1)
    assert style.prompt(FIRST) == (
        "task: put a mug in shelf.\n"
        "see:\n"
        "You are in the middle of a room. Looking quickly around you, you see a drawer 1, and a shelf 1.\n"
        "can:\n"
        "go to drawer 1\n"
        "go to shelf 1\n"
        "inventory\n"
        "look"
    )
    assert style.prompt(THIRD) == (
        "task: put a mug in shelf.\ndid:\nfly\nsee:\nNothing happens.\ncan:\nlook\nopen drawer 1"
    )
    assert "did:" not in CompactStyle(history=0).prompt(THIRD)


@pytest.mark.parametrize(
    ("response", "action", "valid"),
    [
        ("<think>a</think><action>Look</action>", "look", True),
        ("<think>a</think>\n<ACTION>\n Open Drawer 1 \n</ACTION>", "open drawer 1", True),
        ("<think>a</think><action>look</action><action>help</action>", "look", True),
        ("<think>a</think><action>dance wildly</action>", "dance wildly", True),  # not admissible, yet well-formed
        ("<action>look</action></think><think>", "look", True),  # the reference asks for both tags, in any order
        ("<action>look</action>", "look", False),
        ("<THINK>a</THINK><action>look</action>", "look", False),
        ("<think>a</think><action>look 看</action>", "look 看", False),
        ("<think>\u9fff</think><action>look</action>", "look", False),
        ("<think>\u3042 \ua000</think><action>look</action>", "look", True),
        ("<think>a</think></action><action>look", "", True),  # closed before it opens: nothing between, as there
        ("<think>a</think><action>look", "<think>a</think><action>look"[-30:], False),
        ("I would rather GO TO the shelf 1 now, please", "er go to the shelf 1 now, please"[-30:], False),
        ("", "", False),
    ],
)
def test_paper_projection(response: str, action: str, valid: bool):
    assert PaperStyle().parse_action(response, ADMISSIBLE) == (action, valid)


def test_without_think_only_the_action_tags_count():
    style = PaperStyle(think=False)
    assert style.parse_action("<action>look</action>", []) == ("look", True)
    assert style.parse_action("look", []) == ("look", False)
    assert style.parse_action("<action>看</action>", []) == ("看", False)


@pytest.mark.parametrize(
    ("response", "action", "valid"),
    [
        ("look", "look", True),
        ("  Go To Shelf 1\n", "go to shelf 1", True),
        ("help", "help", False),
        ("go to shelf 2", "go to shelf 2", False),
        ("<action>look</action>", "<action>look</action>", False),
        ("", "", False),
    ],
)
def test_compact_projection(response: str, action: str, valid: bool):
    assert CompactStyle().parse_action(response, ADMISSIBLE) == (action, valid)


@pytest.mark.parametrize("style", [PaperStyle(), PaperStyle(think=False), CompactStyle()])
def test_own_answers_are_valid(style):
    assert style.parse_action(style.format_action("go to shelf 1"), ADMISSIBLE) == ("go to shelf 1", True)


def test_task_text():
    assert task_text(OPENING) == "put a mug in shelf."
    with pytest.raises(ValueError, match="no 'Your task is to:'"):
        task_text("You are nowhere.")


def test_make_style():
    assert isinstance(make_style("paper", history=2, think=True), PaperStyle)
    assert isinstance(make_style("compact", history=3, think=True), CompactStyle)
    with pytest.raises(ValueError, match="fancy"):
        make_style("fancy", history=2, think=True)
