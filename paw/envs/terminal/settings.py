"""Keys of `[env]` of the terminal."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paw.config.values import Count, Only, Positive, Seconds
from paw.envs.settings import PromptConfig

TaskKind = Literal["find", "count", "edit", "fix"]


class TerminalConfig(PromptConfig):
    """A shell in a sandbox. env.data is a folder of task folders (docs/terminal.md)."""

    name: str = "terminal"
    """Which environment."""
    eval_split: str = "test"
    """Split to evaluate on."""
    style: Literal["paper", "compact"] = "paper"
    """paper: a prompt like the paper's, with <action> tags. compact: a short prompt for tiny
    models; the whole response is the command."""
    kinds: Annotated[list[TaskKind], Only("env.data", (None,))] = ["find", "count", "edit", "fix"]
    """Kinds of generated tasks to play."""
    command_timeout_s: Seconds = 10.0
    """Seconds after which a command and its shell are stopped."""
    check_timeout_s: Seconds = 60.0
    """Seconds after which a check is stopped and counts as failed. A task's own limit takes
    precedence."""
    memory_mib: Annotated[int, Field(ge=16)] = 512
    """Memory limit in MiB, for each process of a command and for all together. This and the next
    two keys do not apply to a container, which has its own limits."""
    max_processes: Annotated[int, Field(ge=4, le=10_000)] = 64
    """Maximum number of processes that run at the same time in a sandbox."""
    disk_mib: Count = 64
    """Maximum size of a task's files, in MiB."""
    output_chars: Annotated[int, Field(ge=100)] = 4000
    """Maximum number of characters of a command's output that are shown. Of a longer output, the
    beginning and the end are shown."""
    readable: list[Path] = []
    """Additional folders of this machine that commands may read, such as a virtual environment.
    Their bin/ comes first in PATH."""
    container: str | None = None
    """Command that starts a container instead of bubblewrap. bash and its arguments are appended.
    {image}, {folder} and {name} stand for the task's image, its folder of files and a new name."""
    container_stop: Annotated[str | None, Only("env.container")] = None
    """Command that ends a container whose command ran into a limit, such as docker kill {name}."""
    reward: Positive = 1.0
    """Return of a solved task, R_max."""
