"""ALFWorld's text game in plain Python: one household, played one command at a time.

Feedback, admissible commands and the win flag are string for string those of the real engine
(textworld's PddlEnv with alfworld's AlfredDemangler, alfworld 0.4.2) with the rules of
`data/alfred.pddl` and `data/alfred.twl2`. The rules have quirks, and an agent trained here must
meet the same ones:

- Only the object in hand can be examined. A stray comma in the domain disables the branch for
  objects in sight.
- `look` sees no receptacle before the first move, although the welcome text has just listed them
  all.
- A lamp can be used again and again, and always says "You turn on".
- "Next to it, you see a mug 1" appears after a mug was taken off one receptacle and put down on
  another at the same location. The mug is then where the agent is, and known not to be in the first
  receptacle. The sentence appears once for each such receptacle.
- `go to` a receptacle at the agent's own location is not admissible.
- Cleaning, heating and cooling work through closed doors. Slicing works on unseen objects.
"""

from collections.abc import Iterable

from paw.envs.alfworld.problem import REQUIRED_STATE, Game

NOTHING_HAPPENS = "Nothing happens."
# The grammar begins this text with an empty line. The real engine drops it.
HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
_KNIVES = ("knifetype", "butterknifetype")
_NO_STATES: frozenset[str] = frozenset()
# Rules of examineObject in the grammar's order. The first one whose states all hold applies.
_ADJECTIVES = tuple(
    (frozenset(states.split()), adjective)
    for states, adjective in (
        ("clean hot sliced", "hot and clean sliced"),
        ("clean cool sliced", "cool and clean sliced"),
        ("clean sliced", "clean sliced"),
        ("hot sliced", "hot sliced"),
        ("cool sliced", "cool sliced"),
        ("clean hot", "hot and clean"),
        ("clean cool", "cool and clean"),
        ("hot", "hot"),
        ("clean", "clean"),
        ("cool", "cold"),
    )
)


def _listing(names: Iterable[str]) -> str:
    return _join([f"a {name}" for name in names]) or "nothing"


def _join(names: list[str]) -> str:
    return ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else "".join(names)


class Household:
    """One episode of `game`. Read the state freely, but change it only with `reset` and `step`."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.reset()

    def reset(self) -> str:
        """Start again. Returns the welcome text, the view of the room and the task."""
        game = self.game
        self.location = game.start
        self.held: str | None = None
        self.contents = dict(game.contents)
        """Sorted objects in each receptacle, by receptacle id.

        The tuples are shared with the game and never changed in place.
        """
        self.object_location = set(game.object_location)
        self.taken_from: set[tuple[str, str]] = set()
        """Pairs (object, receptacle) that no longer hold because of an action.

        The grammar's not_inreceptacle knows only these.
        """
        self.opened = set(game.opened)
        self.states = dict(game.states)
        self._won: bool | None = None
        self._admissible: dict[str, tuple] | None = None
        view = self._facing() or self._in_the_middle(
            game.names[receptacle] for receptacle in game.location
        )
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{view}\n\n{game.task}"

    def step(self, command: str) -> str:
        """Play `command`. Returns the feedback.

        A command that is not admissible does nothing, and the feedback says so.
        """
        play, *arguments = self._actions().get(command.strip(), (None,))
        if play is None:
            return NOTHING_HAPPENS
        self._won = self._admissible = None
        return play(*arguments)

    @property
    def admissible(self) -> list[str]:
        """Return the commands that do something now, sorted. They include `help`."""
        return sorted(self._actions())

    @property
    def won(self) -> bool:
        """Whether the goal holds now. It can cease to hold if play goes on."""
        if self._won is None:
            self._won = self._goal_holds()
        return self._won

    def state_of(self, thing: str) -> frozenset[str]:
        """Return which of clean, hot, cool, sliced, toggled hold for an object id."""
        return self.states.get(thing, _NO_STATES)

    def can_hold(self, receptacle: str, thing: str) -> bool:
        """Whether the domain allows the object in the receptacle, open or not."""
        game = self.game
        return (
            game.receptacle_type.get(receptacle),
            game.object_type.get(thing),
        ) in game.can_contain

    def is_shut(self, receptacle: str) -> bool:
        return receptacle in self.game.able["openable"] and receptacle not in self.opened

    def _goal_holds(self) -> bool:
        game = self.game
        goal = game.goal
        if goal.kind == "look":
            return self.held in game.candidates and any(
                lamp in game.targets and "toggled" in self.state_of(lamp)
                for receptacle in game.at.get(self.location, ())
                for lamp in self.contents[receptacle]
            )
        required_state = REQUIRED_STATE.get(goal.kind)
        needed = 2 if goal.kind == "two" else 1

        def done(thing: str) -> bool:
            return thing in game.candidates and (
                required_state is None or required_state in self.state_of(thing)
            )

        return any(
            sum(map(done, self.contents.get(target, ()))) >= needed for target in game.targets
        )

    # ---- what can be done

    def _actions(self) -> dict[str, tuple]:
        """Return, by admissible command, the method that plays it and its arguments."""
        if self._admissible is not None:
            return self._admissible
        actions: dict[str, tuple] = {
            command: (self._go, receptacle)
            for command, receptacle in self.game.destinations.items()
            if self.game.location[receptacle] != self.location
        }
        actions |= {"look": (self._look,), "inventory": (self._inventory,), "help": (lambda: HELP,)}
        for receptacle in self.game.at.get(self.location, ()):
            actions |= self._actions_at(receptacle)
        if self.held is not None:
            actions |= self._actions_with(self.held)
        self._admissible = actions
        return actions

    def _actions_at(self, receptacle: str) -> dict[str, tuple]:
        """Return the actions on a receptacle, on what is in it, and with what is held there."""
        names = self.game.names
        able = self.game.able
        name = names[receptacle]
        is_shut = self.is_shut(receptacle)
        actions: dict[str, tuple] = {f"examine {name}": (self._examine_receptacle, receptacle)}
        if is_shut:
            actions[f"open {name}"] = (self._open, receptacle)
        elif receptacle in able["openable"]:
            actions[f"close {name}"] = (self._close, receptacle)

        for thing in self.contents[receptacle]:
            if self.held is None and not is_shut and thing in able["pickupable"]:
                actions[f"take {names[thing]} from {name}"] = (self._take, thing, receptacle)
            if thing in able["toggleable"]:
                message = f"You turn on the {names[thing]}."
                actions[f"use {names[thing]}"] = (self._add, thing, "toggled", message)

        held_object = self.held
        if held_object is None:
            return actions
        if not is_shut and self.can_hold(receptacle, held_object):
            actions[f"move {names[held_object]} to {name}"] = (self._put, held_object, receptacle)
        for verb, tools in self.game.tools.items():
            is_tool = self.game.receptacle_type.get(receptacle) in tools
            if is_tool and held_object in able[f"{verb}able"]:
                command = f"{verb} {names[held_object]} with {name}"
                actions[command] = (self._treat, held_object, receptacle, verb)
        return actions

    def _actions_with(self, held: str) -> dict[str, tuple]:
        """Return the actions on the held object, and on others with it."""
        names = self.game.names
        actions: dict[str, tuple] = {f"examine {names[held]}": (self._examine_object, held)}
        if self.game.object_type.get(held) not in _KNIVES:
            return actions
        for thing in self.game.able["sliceable"]:
            if (thing, self.location) in self.object_location:
                message = f"You sliced the {names[thing]} with the {names[held]}."
                command = f"slice {names[thing]} with {names[held]}"
                actions[command] = (self._add, thing, "sliced", message)
        return actions

    # ---- what is only described

    def _inventory(self) -> str:
        if self.held:
            return f"You are carrying: a {self._name(self.held)}."
        return "You are not carrying anything."

    def _look(self) -> str:
        return self._facing() or self._in_the_middle(())

    def _facing(self) -> str:
        """Return the view from in front of receptacles; "" if there are none."""
        names = self.game.names
        receptacles = self.game.at.get(self.location, ())
        if not receptacles:
            return ""
        beside = []
        for thing, location in sorted(self.object_location if self.taken_from else ()):
            if location != self.location:
                continue
            for receptacle in receptacles:
                if (thing, receptacle) in self.taken_from:
                    beside.append(names[thing])
        faced = _join([names[receptacle] for receptacle in receptacles])
        return f"You are facing the {faced}. Next to it, you see {_listing(beside)}."

    def _in_the_middle(self, names: Iterable[str]) -> str:
        seen = _listing(names)
        return f"You are in the middle of a room. Looking quickly around you, you see {seen}."

    def _examine_receptacle(self, receptacle: str) -> str:
        name = self._name(receptacle)
        if self.is_shut(receptacle):
            return f"The {name} is closed."
        seen = _listing([self.game.names[thing] for thing in self.contents[receptacle]])
        if receptacle in self.game.able["openable"]:
            return f"The {name} is open. In it, you see {seen}."
        return f"On the {name}, you see {seen}."

    def _examine_object(self, thing: str) -> str:
        name = self._name(thing)
        states = self.state_of(thing)
        inner = self.game.inner
        if thing in inner:
            seen = _listing([self._name(content) for content in inner[thing]])
            return f"This is a normal {name}. In it, you see {seen}."
        for needed, adjective in _ADJECTIVES:
            if needed <= states:
                return f"This is a {adjective} {name}."
        if "toggled" in states:
            return f"This {name} is on."
        if "sliced" in states:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    def _name(self, thing: str) -> str:
        return self.game.names[thing]

    # ---- what changes the household

    def _go(self, receptacle: str) -> str:
        self.location = self.game.location[receptacle]
        return f"You arrive at {self._name(receptacle)}. {self._examine_receptacle(receptacle)}"

    def _open(self, receptacle: str) -> str:
        self.opened.add(receptacle)
        return f"You open the {self._name(receptacle)}. {self._examine_receptacle(receptacle)}"

    def _close(self, receptacle: str) -> str:
        self.opened.discard(receptacle)
        return f"You close the {self._name(receptacle)}."

    def _take(self, thing: str, receptacle: str) -> str:
        self.contents[receptacle] = tuple(t for t in self.contents[receptacle] if t != thing)
        self.taken_from.add((thing, receptacle))
        self.object_location.discard((thing, self.location))
        self.held = thing
        return f"You pick up the {self._name(thing)} from the {self._name(receptacle)}."

    def _put(self, thing: str, receptacle: str) -> str:
        self.contents[receptacle] = tuple(sorted({*self.contents[receptacle], thing}))
        self.taken_from.discard((thing, receptacle))
        self.object_location.add((thing, self.location))
        self.held = None
        return f"You move the {self._name(thing)} to the {self._name(receptacle)}."

    def _treat(self, thing: str, receptacle: str, verb: str) -> str:
        new_state = REQUIRED_STATE[verb]
        self.states[thing] = self.state_of(thing) - {"hot": {"cool"}, "cool": {"hot"}}.get(
            new_state, set()
        )
        return self._add(
            thing,
            new_state,
            f"You {verb} the {self._name(thing)} using the {self._name(receptacle)}.",
        )

    def _add(self, thing: str, state: str, said: str) -> str:
        self.states[thing] = self.state_of(thing) | {state}
        return said
