"""An oracle for household games: it reads the hidden state, so it never searches, and who imitates it has to guess."""

from collections.abc import Iterable

from paw.envs.alfworld.household import Household
from paw.envs.alfworld.problem import REQUIRED_STATE, Game


def oracle(household: Household) -> str:
    """The next command of a plan that wins from any state; "look" when won already or beyond help.

    Among equals it prefers what is at the agent's location, so that "go to" settles the next choice
    and nothing loops.
    """
    game, held = household.game, household.held
    if household.won:
        return "look"
    if held is None:
        return _fetch(household)
    if held not in game.candidates:
        return _move_to_nearest(
            household, (r for r in game.location if household.can_hold(r, held))
        )
    if game.kind == "look":
        return _use_lamp(household)
    if game.kind in REQUIRED_STATE and REQUIRED_STATE[game.kind] not in household.state_of(held):
        return _treat(household, held)
    targets = [r for r in game.targets if household.can_hold(r, held)]
    return _move_to_nearest(
        household, [_fullest(household)] if game.kind == "two" and targets else targets
    )


def solve(game: Game, *, max_steps: int = 60) -> list[str]:
    """The expert's commands from the start of `game` until it is won.

    ValueError after `max_steps`.
    """
    household, commands = Household(game), []
    while not household.won:
        if len(commands) == max_steps:
            raise ValueError(f"game {game.name}: the expert has not won it after {max_steps} steps")
        commands.append(oracle(household))
        household.step(commands[-1])
    return commands


def _effort(household: Household, receptacle: str) -> tuple[bool, bool, str]:
    """Sort key: here before elsewhere, open before shut, then by id."""
    return (
        household.game.location[receptacle] != household.location,
        household.is_shut(receptacle),
        receptacle,
    )


def _fetch(household: Household) -> str:
    """Towards an object that can fulfil the goal: a finished one (clean, hot, cool) first, then the nearest."""
    game, state = household.game, REQUIRED_STATE.get(household.game.kind)
    delivered = (
        household.contents[_fullest(household)] if game.kind == "two" and game.targets else ()
    )
    choices = [
        (
            state is not None and state not in household.state_of(thing),
            *_effort(household, receptacle),
            thing,
        )
        for receptacle in game.location
        for thing in household.contents[receptacle]
        if thing in game.candidates and thing in game.able["pickupable"] and thing not in delivered
    ]
    if not choices:
        return "look"
    *_, receptacle, thing = min(choices)
    return (
        _reach(household, receptacle) or f"take {game.names[thing]} from {game.names[receptacle]}"
    )


def _fullest(household: Household) -> str:
    """The receptacle in which to gather two objects: that which holds most of them, else the nearest.

    Between filled ones the agent's location does not count: it would go to and fro between two that
    hold one each.
    """

    def rank(receptacle: str) -> tuple:
        filled = sum(
            thing in household.game.candidates for thing in household.contents.get(receptacle, ())
        )
        return (-filled, receptacle) if filled else (0, *_effort(household, receptacle))

    return min(household.game.targets, key=rank)


def _treat(household: Household, held: str) -> str:
    """Clean, heat or cool the object in hand; no door needs opening for it."""
    game = household.game
    choices = [r for r in game.location if game.receptacle_type.get(r) in game.tools[game.kind]]
    tool = min(choices, key=lambda receptacle: _effort(household, receptacle), default=None)
    if tool is None:
        return "look"
    return _go(household, tool) or f"{game.kind} {game.names[held]} with {game.names[tool]}"


def _use_lamp(household: Household) -> str:
    game = household.game
    choices = [
        (*_effort(household, receptacle), thing)
        for receptacle in game.location
        for thing in household.contents[receptacle]
        if thing in game.targets and thing in game.able["toggleable"]
    ]
    if not choices:
        return "look"
    *_, receptacle, lamp = min(choices)
    return _go(household, receptacle) or f"use {game.names[lamp]}"


def _move_to_nearest(household: Household, receptacles: Iterable[str]) -> str:
    """Put the object in hand into one of `receptacles`."""
    places = sorted(receptacles, key=lambda receptacle: _effort(household, receptacle))
    if not places or household.held is None:
        return "look"
    names = household.game.names
    return _reach(household, places[0]) or f"move {names[household.held]} to {names[places[0]]}"


def _reach(household: Household, receptacle: str) -> str | None:
    """The step still needed before the hand can reach into the receptacle."""
    go = _go(household, receptacle)
    if go is None and household.is_shut(receptacle):
        return f"open {household.game.names[receptacle]}"
    return go


def _go(household: Household, receptacle: str) -> str | None:
    here = household.game.location[receptacle] == household.location
    return None if here else f"go to {household.game.names[receptacle]}"
