"""Prompts letter by letter, and the projection from a response to an action."""

import pytest

from paw.envs.alfworld.prompt import CompactStyle, PaperStyle, task_text

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


def test_paper_history_is_the_last_two_numbered_from_one():
    past = [(f"see {i}", f"do {i}") for i in range(1, 5)]
    prompt = PaperStyle().prompt("{task} {0}", past, "{z}", ["look"])
    assert (
        "[Observation 3: 'see 3', Action 3: 'do 3']\n[Observation 4: 'see 4', Action 4: 'do 4']\nYou are now" in prompt
    )
    assert "already taken 4 step(s). Below are the most recent 2 observations" in prompt
    assert "{task} {0}" in prompt and "{z}" in prompt  # braces in game text are left alone
    without = PaperStyle(history=0).prompt(*THIRD)
    assert "Your task is to: put a mug in shelf." in without and "[Observation" not in without


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


def test_compact_projection_and_own_answers():
    style = CompactStyle()
    assert style.parse_action("  Go To Shelf 1\n", ADMISSIBLE) == ("go to shelf 1", True)
    for response in ("help", "go to shelf 2", "<action>look</action>", ""):
        assert style.parse_action(response, ADMISSIBLE) == (response, False)
    for style in (PaperStyle(), PaperStyle(think=False), CompactStyle()):
        assert style.parse_action(style.format_action("go to shelf 1"), ADMISSIBLE) == ("go to shelf 1", True)


def test_task_text():
    assert task_text(OPENING) == "put a mug in shelf."
    with pytest.raises(ValueError, match="no 'Your task is to:'"):
        task_text("You are nowhere.")
