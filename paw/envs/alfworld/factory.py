"""ALFWorld: the games of training, warm-up and evaluation, and one episode of a game.

Evaluation on files draws games with replacement, as the independently seeded environments of the
reference code do.
"""

import functools
import hashlib
import tempfile
from importlib import metadata
from pathlib import Path

from paw.envs.alfworld import generator, index
from paw.envs.alfworld.household import Household
from paw.envs.alfworld.oracle import oracle
from paw.envs.alfworld.problem import KINDS, Game
from paw.envs.alfworld.prompt import TASK, CompactStyle, PaperStyle, Style
from paw.envs.alfworld.tables import DIFFICULTIES
from paw.envs.alfworld.textworld import require_textworld
from paw.envs.base import Endless, EnvFactory, Sized, Tasks
from paw.envs.settings import AlfworldConfig, TaskKind
from paw.envs.workers.worker import Worker
from paw.errors import UserError
from paw.types import Outcome, Task

HELD_OUT = "valid_unseen"
"""The only split of generated games for evaluation."""
KEPT_GAMES = 512
"""Parsed games kept in memory. This is more than an evaluation needs."""
TEXTWORLD = "paw.envs.alfworld.textworld:TextworldHousehold"


class AlfworldFactory(EnvFactory):
    """The games of env.data, or an endless supply of generated ones.

    Raises UserError if env.data lacks something, if a split is neither in env.data nor generated,
    or if textworld is needed but not installed.
    """

    Config = AlfworldConfig
    name = "alfworld"
    distinct_eval = False

    def __init__(self, config: AlfworldConfig) -> None:
        if not config.kinds:
            raise UserError(f"env.kinds is empty; name at least one of {', '.join(KINDS)}")
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        self.may_block = config.backend == "textworld"
        if self.may_block:
            require_textworld()
        self._root = None if config.data is None else index.find_root(config.data)
        self._kinds: list[TaskKind] | None = config.kinds
        """Kinds of generated games; None for all that the difficulty offers."""
        if set(config.kinds) == set(KINDS):
            # The default is all six, but a difficulty must not be asked for kinds that it lacks.
            self._kinds = None
        self._games_of_split = functools.cache(self._load_split)
        self._read = functools.lru_cache(KEPT_GAMES)(Game.load)
        self._generate = functools.lru_cache(KEPT_GAMES)(self._generate_game)
        self._check_splits()

    def tasks(self, split: str, seed: int) -> Tasks:
        """Return the games of a split. Those of the warm-up are always generated.

        Raises UserError if the split is unknown, missing or empty.
        """
        if split != "warmup" and self._root is not None:
            return self._tasks_from_files(self._root, split)

        stream = {"warmup": "warmup", "train": "train", HELD_OUT: "unseen"}.get(split)
        if stream is None:
            raise UserError(
                f"generated games have no split '{split}'; use '{HELD_OUT}', or set env.data"
            )

        def task(i: int) -> Task:
            game = self._generate(stream, seed, i)
            return Task(f"generated/{stream}/{seed}/{i}", game.kind, game)

        return Endless(task)

    def make(self) -> "AlfworldEnv":
        return AlfworldEnv(self.config)

    def fingerprint(self) -> str:
        """Say where the games come from, and their hash. With textworld, also its version."""
        config = self.config
        engine = ""
        if config.backend == "textworld":
            engine = f"textworld {metadata.version('textworld')} "
        if self._root is None:
            kinds = ",".join(self._kinds or DIFFICULTIES[config.difficulty].kinds)
            digest = hashlib.sha256()
            for split in generator.SPLITS:
                for i in range(8):
                    digest.update(repr(self._generate(split, 0, i).scene).encode())
            return f"{engine}generated {config.difficulty} {kinds} {digest.hexdigest()[:16]}"

        kinds = ",".join(config.kinds)
        hashes = []
        for split in dict.fromkeys((config.train_split, config.eval_split)):
            if (self._root / split).is_dir():
                digest = index.load_split(self._root, split).digest
                hashes.append(f"{split} {digest[:16]}")
        return f"{engine}alfworld {' '.join(hashes)} {kinds}"

    def _check_splits(self) -> None:
        """Raise UserError if the configured splits cannot be played."""
        config = self.config
        if self._root is not None:
            self._games_of_split(config.eval_split)
            return
        if config.train_split != "train":
            raise UserError(
                f"env.train_split = '{config.train_split}' needs env.data: "
                "generated games have only 'train'"
            )
        if config.eval_split != HELD_OUT:
            raise UserError(
                f"generated games have no split '{config.eval_split}' to evaluate on; "
                f"use '{HELD_OUT}', or set env.data"
            )
        self._generate("train", 0, 0)

    def _tasks_from_files(self, root: Path, split: str) -> Sized:
        games = self._games_of_split(split)

        def task(i: int) -> Task:
            task_id, kind = games[i]
            return Task(task_id, kind, self._read(root / task_id / index.GAME_FILE))

        return Sized(task, len(games))

    def _generate_game(self, split: str, seed: int, i: int) -> Game:
        games = generator.games(
            split,
            start=i,
            count=1,
            seed=seed,
            difficulty=self.config.difficulty,
            kinds=self._kinds,
        )
        return next(games)

    def _load_split(self, split: str) -> list[tuple[str, str]]:
        """Return (id, kind) of the split's games of env.kinds."""
        assert self._root is not None
        all_games = index.load_split(self._root, split).games
        kinds: frozenset[str] = frozenset(self.config.kinds)
        games = [(task_id, kind) for task_id, kind in all_games if kind in kinds]
        if not games:
            raise UserError(
                f"{self._root / split} holds no game of env.kinds = {self.config.kinds}; "
                "name other kinds"
            )
        return games


class AlfworldEnv:
    """One episode at a time, in this process (native) or in a child process (textworld)."""

    task: str = ""

    def __init__(self, config: AlfworldConfig) -> None:
        self.config = config
        style = PaperStyle if config.style == "paper" else CompactStyle
        self.style: Style = style(history=config.history, think=config.think)
        self._worker: Worker | None = None
        if config.backend == "textworld":
            self._worker = Worker(TEXTWORLD, timeout_s=config.step_timeout_s)
        self._household: Household | Worker | None = None
        # Set by `reset`.
        self._game: Game
        self._text = ""
        """The last observation."""
        self._past: list[tuple[str, str]] = []
        """(observation, action) of each turn so far."""
        self._admissible: list[str] = []

    def reset(self, task: Task) -> str:
        """Start `task`, whose payload is a Game.

        Raises EnvironmentFailure if textworld's worker died, hung or raised.
        """
        self._game = task.payload
        self._household = self._worker or Household(self._game)
        self._text = self._start(self._household)
        self.task = self._text.partition(TASK)[2].strip()
        self._past = []
        self._admissible = self._playable()
        return self._text

    def context(self) -> str:
        return self.style.prompt(self.task, self._past, self._text, self._admissible)

    def step(self, response: str) -> Outcome:
        """Play the action in `response`.

        The episode ends when it is won, or after env.max_turns turns.
        """
        assert self._household is not None, "step() before reset()"
        action, valid = self.style.parse_action(response, self._admissible)
        feedback = self._household.step(action)
        won = self._household.won

        self._past.append((self._text, action))
        self._text = feedback
        self._admissible = self._playable()
        done = won or len(self._past) >= self.config.max_turns
        reward = self.config.reward if won else 0.0
        return Outcome(feedback, reward, done=done, won=won, action=action, valid=valid)

    def oracle(self) -> str:
        household = self._household
        if not isinstance(household, Household):
            # The oracle reads the hidden state. textworld does not show it, so replay the episode.
            household = Household(self._game)
            for _, action in self._past:
                household.step(action)
        return self.style.format_action(oracle(household))

    def admissible_actions(self) -> list[str]:
        return list(self._admissible)

    def format_action(self, action: str) -> str:
        return self.style.format_action(action)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _playable(self) -> list[str]:
        """Return the admissible actions that the agent is shown."""
        assert self._household is not None
        return [action for action in self._household.admissible if action != "help"]

    def _start(self, household: Household | Worker) -> str:
        """Start the game in `household`. Returns its first text."""
        if isinstance(household, Household):
            return household.reset()
        if self._game.scene is None:  # it was read from a file, and the name is its path
            return household.start(path=self._game.name)
        with tempfile.TemporaryDirectory(prefix="paw-") as folder:
            path = generator.write(self._game, Path(folder))
            return household.start(path=str(path))
