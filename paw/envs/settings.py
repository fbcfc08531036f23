"""Keys of `[env]` that several environments share, and those of the households and of the shop."""

from pathlib import Path
from typing import Annotated, Literal

from paw.config import EnvConfig
from paw.values import Count, Natural, Only, Positive

TaskKind = Literal["pick", "look", "clean", "heat", "cool", "two"]


class PromptConfig(EnvConfig):
    """Keys of environments whose prompts are those of the paper."""

    data: Path | None = None
    """Folder of the environment's files (`paw data NAME` says where they are); unset, everything is generated."""
    history: Natural = 2
    """Past turns shown in the prompt."""
    style: Literal["paper", "compact"] = "paper"
    """paper: the paper's prompt, <action> tags. compact: a short prompt for tiny models, the response is the action."""
    think: Annotated[bool, Only("env.style", ("paper",))] = True
    """Whether a valid response needs <think>...</think>."""


class SpokenConfig(EnvConfig):
    """Keys of environments whose observations are the user's messages of a conversation."""

    instruction: Path | None = None
    """File with the system message: rules, and the form of an answer."""
    eval_split: str = "test"
    """Split to evaluate on."""
    reward: Positive = 1.0
    """Return of an episode that is won, R_max."""


class AlfworldConfig(PromptConfig):
    """Household games."""

    name: str = "alfworld"
    """Which environment."""
    backend: Literal["native", "textworld"] = "native"
    """Game engine: PaW's own, or TextWorld in a process of its own."""
    difficulty: Literal["tiny", "small", "medium", "full"] = "full"
    """Size of generated rooms."""
    kinds: list[TaskKind] = ["pick", "look", "clean", "heat", "cool", "two"]
    """Kinds of tasks played."""


class WebshopConfig(PromptConfig):
    """A shop; env.data is the folder of its three JSON files."""

    name: str = "webshop"
    """Which environment."""
    catalogue: Annotated[Literal["small", "full"], Only("env.data")] = "small"
    """Which files: items_shuffle_1000.json and items_ins_v2_1000.json, or those without _1000."""
    goals: Literal["synthetic", "human"] = "synthetic"
    """Every combination of options of each product, or the instructions that people wrote."""
    products: Annotated[Count, Only("env.data", (None,))] = 3000
    """Products of the generated catalogue."""
    nouns: Literal["auto", "spacy", "rules"] = "auto"
    """How the nouns of a title are found, for the reward: spaCy's English model, a small filter, or the first there."""
