"""An oracle for household games.

It reads the hidden state, so it never searches for an object. A model that imitates it must guess
where objects are.
"""

from collections.abc import Sequence

from paw.envs.alfworld.household import Household
from paw.envs.alfworld.problem import REQUIRED_STATE, Game


def oracle(household: Household) -> str:
    """Return the next command of a plan that wins from any state; "look" if the game is over.

    Among equally good receptacles it prefers one at the agent's location. So a "go to" settles the
    next choice, and the plan cannot loop.
    """
    game = household.game
    held_object = household.held
    if household.won:
        return "look"
    if held_object is None:
        return _fetch(household)
    if held_object not in game.candidates:  # it is useless, so put it down
        holders = [
            receptacle
            for receptacle in game.location
            if household.can_hold(receptacle, held_object)
        ]
        return _move_to_nearest(household, holders)
    if game.kind == "look":
        return _use_lamp(household)
    if game.kind in REQUIRED_STATE and REQUIRED_STATE[game.kind] not in household.state_of(
        held_object
    ):
        return _treat(household, held_object)

    targets = [
        receptacle for receptacle in game.targets if household.can_hold(receptacle, held_object)
    ]
    if game.kind == "two" and targets:
        targets = [_fullest(household)]
    return _move_to_nearest(household, targets)


def solve(game: Game, *, max_steps: int = 60) -> list[str]:
    """Return the oracle's commands from the start of `game` until it is won.

    Raises ValueError if it is not won after `max_steps` commands.
    """
    household = Household(game)
    commands: list[str] = []
    while not household.won:
        if len(commands) == max_steps:
            raise ValueError(f"game {game.name}: the expert has not won it after {max_steps} steps")
        command = oracle(household)
        household.step(command)
        commands.append(command)
    return commands


def _effort(household: Household, receptacle: str) -> tuple[bool, bool, str]:
    """Sort key: receptacles at the agent's location first, then open before closed, then by id."""
    is_elsewhere = household.game.location[receptacle] != household.location
    return is_elsewhere, household.is_shut(receptacle), receptacle


def _fetch(household: Household) -> str:
    """Return the next command on the way to take an object that can fulfil the goal.

    It prefers objects that are already clean, hot or cool, as the goal requires, and then the
    nearest.
    """
    game = household.game
    required = REQUIRED_STATE.get(game.kind)
    delivered: tuple[str, ...] = ()
    if game.kind == "two" and game.targets:
        delivered = household.contents[_fullest(household)]

    choices = []
    for receptacle in game.location:
        for thing in household.contents[receptacle]:
            if thing not in game.candidates or thing not in game.able["pickupable"]:
                continue
            if thing in delivered:
                continue
            is_unfinished = required is not None and required not in household.state_of(thing)
            choices.append((is_unfinished, *_effort(household, receptacle), thing))
    if not choices:
        return "look"

    *_, receptacle, thing = min(choices)
    take = f"take {game.names[thing]} from {game.names[receptacle]}"
    return _reach(household, receptacle) or take


def _fullest(household: Household) -> str:
    """Return the target in which to gather two objects: the one that holds most, else the nearest.

    If two targets hold one object each, the agent's location does not count. Otherwise the agent
    would go back and forth between them.
    """

    def rank(receptacle: str) -> tuple:
        contents = household.contents.get(receptacle, ())
        number = sum(thing in household.game.candidates for thing in contents)
        if number:
            return (-number, receptacle)
        return (0, *_effort(household, receptacle))

    return min(household.game.targets, key=rank)


def _treat(household: Household, held: str) -> str:
    """Return the next command on the way to clean, heat or cool the object in hand.

    No door needs to be open for that.
    """
    game = household.game
    tool_types = game.tools[game.kind]
    tools = [place for place in game.location if game.receptacle_type.get(place) in tool_types]
    if not tools:
        return "look"
    tool = min(tools, key=lambda receptacle: _effort(household, receptacle))
    treat = f"{game.kind} {game.names[held]} with {game.names[tool]}"
    return _go(household, tool) or treat


def _use_lamp(household: Household) -> str:
    """Return the next command on the way to switch on the nearest lamp."""
    game = household.game
    choices = []
    for receptacle in game.location:
        for thing in household.contents[receptacle]:
            if thing in game.targets and thing in game.able["toggleable"]:
                choices.append((*_effort(household, receptacle), thing))
    if not choices:
        return "look"

    *_, receptacle, lamp = min(choices)
    return _go(household, receptacle) or f"use {game.names[lamp]}"


def _move_to_nearest(household: Household, receptacles: Sequence[str]) -> str:
    """Return the next command on the way to put the held object into the nearest receptacle."""
    if not receptacles or household.held is None:
        return "look"
    nearest = min(receptacles, key=lambda receptacle: _effort(household, receptacle))
    names = household.game.names
    move = f"move {names[household.held]} to {names[nearest]}"
    return _reach(household, nearest) or move


def _reach(household: Household, receptacle: str) -> str | None:
    """Return the command needed to reach into the receptacle; None if the hand already can."""
    go = _go(household, receptacle)
    if go is None and household.is_shut(receptacle):
        return f"open {household.game.names[receptacle]}"
    return go


def _go(household: Household, receptacle: str) -> str | None:
    """Return the command that goes to the receptacle; None if the agent is there."""
    if household.game.location[receptacle] == household.location:
        return None
    return f"go to {household.game.names[receptacle]}"
