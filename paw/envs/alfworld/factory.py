"""ALFWorld: which games are played in training, warm-up and evaluation, and one episode of them.

Evaluation on files draws with replacement, as the reference code's independently seeded
environments do.
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
from paw.envs.base import Endless, EnvFactory, Made, Tasks
from paw.envs.settings import AlfworldConfig
from paw.envs.worker import Worker
from paw.errors import UserError
from paw.types import Outcome, Task

HELD_OUT = "valid_unseen"
"""The one split of generated games to evaluate on."""
KEPT_GAMES = 512
"""Parsed games kept in memory; more than an evaluation's worth."""
TEXTWORLD = "paw.envs.alfworld.textworld:TextworldHousehold"


class AlfworldFactory(EnvFactory):
    """The games of env.data, or generated ones, endlessly many.

    Raises UserError: env.data lacks something, what is not generated is asked for, or textworld is
    not installed.
    """

    Config = AlfworldConfig
    name = "alfworld"
    distinct_eval = False

    def __init__(self, config: AlfworldConfig) -> None:
        if not config.kinds:
            raise UserError(f"env.kinds is empty; name at least one of {', '.join(KINDS)}")
        self.may_block = config.backend == "textworld"
        if self.may_block:
            require_textworld()
        self.config, self.reward_max, self.invalid_penalty = (
            config,
            config.reward,
            config.invalid_penalty,
        )
        self._root = None if config.data is None else index.find_root(config.data)
        self._split = functools.cache(self._load_split)
        self._read = functools.lru_cache(KEPT_GAMES)(Game.load)
        self._generate = functools.lru_cache(KEPT_GAMES)(self._generate_game)
        # All six kinds, the default, are those that the difficulty offers; a choice must be one it
        # does offer.
        self._kinds = None if set(config.kinds) == set(KINDS) else config.kinds
        if self._root is not None:
            self._split(config.eval_split)
            return
        if config.train_split != "train":
            raise UserError(
                f"env.train_split = '{config.train_split}' needs env.data: generated ones have 'train' only"
            )
        if config.eval_split != HELD_OUT:
            raise UserError(
                f"generated games have no split '{config.eval_split}' to evaluate on; use '{HELD_OUT}', or set env.data"
            )
        self._generate("train", 0, 0)

    def tasks(self, split: str, seed: int) -> Tasks:
        """UserError: the split is unknown, missing or empty.

        Warm-up games are generated, whatever is trained on.
        """
        if split != "warmup" and self._root is not None:
            games, root = self._split(split), self._root

            def read(i: int) -> Task:
                task_id, kind = games[i]
                return Task(task_id, kind, self._read(root / task_id / index.GAME_FILE))

            return Made(read, len(games))
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
        """Where the games come from and a hash of them; the engine's version where it is not the native one."""
        config, root = self.config, self._root
        engine = (
            f"textworld {metadata.version('textworld')} " if config.backend == "textworld" else ""
        )
        kinds = ",".join(
            self._kinds or (config.kinds if root else DIFFICULTIES[config.difficulty].kinds)
        )
        if root is None:
            digest = hashlib.sha256()
            for split in generator.SPLITS:
                for i in range(8):
                    digest.update(repr(self._generate(split, 0, i).scene).encode())
            return f"{engine}generated {config.difficulty} {kinds} {digest.hexdigest()[:16]}"
        splits = [
            split
            for split in dict.fromkeys((config.train_split, config.eval_split))
            if (root / split).is_dir()
        ]
        hashes = " ".join(
            f"{split} {index.load_split(root, split).digest[:16]}" for split in splits
        )
        return f"{engine}alfworld {hashes} {kinds}"

    def _generate_game(self, split: str, seed: int, i: int) -> Game:
        config = self.config
        return next(
            generator.games(split, i, 1, seed=seed, difficulty=config.difficulty, kinds=self._kinds)
        )

    def _load_split(self, split: str) -> list[tuple[str, str]]:
        assert self._root is not None
        games = [
            game
            for game in index.load_split(self._root, split).games
            if game[1] in self.config.kinds
        ]
        if not games:
            raise UserError(
                f"{self._root / split} holds no game of env.kinds = {self.config.kinds}; name other kinds"
            )
        return games


class AlfworldEnv:
    """One episode at a time, in this process (native) or in a child of its own (textworld)."""

    task: str = ""

    def __init__(self, config: AlfworldConfig) -> None:
        self.config = config
        style = PaperStyle if config.style == "paper" else CompactStyle
        self.style: Style = style(history=config.history, think=config.think)
        self._worker = (
            Worker(TEXTWORLD, timeout_s=config.step_timeout_s)
            if config.backend == "textworld"
            else None
        )
        self._household: Household | Worker | None = None

    def reset(self, task: Task) -> str:
        """Start `task`, whose payload is a Game.

        EnvironmentFailure: textworld's worker died, hung or raised.
        """
        self._game: Game = task.payload
        self._household = self._worker or Household(self._game)
        self._text = self._start(self._household)
        self.task = self._text.partition(TASK)[2].strip()
        self._past: list[tuple[str, str]] = []
        self._admissible = self._playable()
        return self._text

    def context(self) -> str:
        return self.style.prompt(self.task, self._past, self._text, self._admissible)

    def step(self, response: str) -> Outcome:
        """Play what is parsed from `response`; the episode ends when won or after env.max_turns turns."""
        assert self._household is not None, "step() before reset()"
        action, valid = self.style.parse_action(response, self._admissible)
        feedback = self._household.step(action)
        won = self._household.won
        self._past.append((self._text, action))
        self._text, self._admissible = feedback, self._playable()
        done, reward = (
            won or len(self._past) >= self.config.max_turns,
            self.config.reward if won else 0.0,
        )
        return Outcome(feedback, reward, done=done, won=won, action=action, valid=valid)

    def oracle(self) -> str:
        household = self._household
        if not isinstance(
            household, Household
        ):  # the oracle reads hidden state: replay the episode where it shows
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
        assert self._household is not None
        return [action for action in self._household.admissible if action != "help"]

    def _start(self, household: Household | Worker) -> str:
        if isinstance(household, Household):
            return household.reset()
        if self._game.scene is None:
            return household.start(path=self._game.name)  # a file's name is its path
        with tempfile.TemporaryDirectory(prefix="paw-") as folder:
            return household.start(path=str(generator.write(self._game, Path(folder))))
