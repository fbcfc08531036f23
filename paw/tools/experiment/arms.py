"""The arms of a comparison: a name, what it changes in the recipe, and a line on what it is."""

import difflib
import re
import shlex

from paw.errors import UserError

Overrides = dict[str, str]
"""Dotted keys of the configuration and their values, as on the command line."""
GRPO = {"advantage.estimator": "grpo", "wm.enabled": "false"}
PAW = {"advantage.estimator": "grpo", "wm.enabled": "true"}
ESTIMATORS: dict[str, Overrides] = {
    "rloo": {"advantage.estimator": "rloo"},
    "gigpo": {"advantage.estimator": "gigpo"},
    "dr-grpo": {"advantage.estimator": "grpo", "advantage.norm_std": "false"},
    "ppo": {"advantage.estimator": "ppo"},
}
ARMS: dict[str, tuple[Overrides, str]] = {
    "grpo": (GRPO, "GRPO without a world model"),
    "paw": (PAW, "GRPO + PaW, with the recipe's [wm] (the paper's where it says nothing else)"),
    "ce": (PAW | {"wm.loss": "ce"}, "cross-entropy on observations, as in Table 4"),
    "mae": (PAW | {"wm.loss": "mae"}, "MAE without the mask p <= rho"),
    "gce": (PAW | {"wm.loss": "gce"}, "generalised cross-entropy"),
    "constant": (PAW | {"wm.weight": "1.0"}, "lambda = 1 whatever the rewards, as in Table 4"),
    "unselected": (PAW | {"wm.alpha": "1.0"}, "every turn a target, no selection by entropy"),
    "echo": (PAW | {"wm.loss": "ce", "wm.weight": "1.0", "wm.alpha": "1.0"}, "ECHO (arXiv 2605.24517)"),
    "scaled": (PAW | {"wm.scale": "10"}, "PaW's term ten times as large"),
    "dedup": (PAW | {"wm.dedup": "true"}, "identical rows predicted once"),
    **{name: (keys | {"wm.enabled": "false"}, f"{name} without a world model") for name, keys in ESTIMATORS.items()},
    **{f"{name}-paw": (keys | {"wm.enabled": "true"}, f"{name} + PaW") for name, keys in ESTIMATORS.items()},
}


def parse_arms(names: str, free: list[str]) -> dict[str, Overrides]:
    """Arms by name from "grpo,paw", then the free ones, each "name: wm.scale=10 wm.loss=mae".

    Raises UserError for an unknown or repeated name and for a free arm of another form.
    """
    arms: dict[str, Overrides] = {}

    def add(name: str, overrides: Overrides) -> None:
        if name in arms:
            raise UserError(f"arm '{name}' is there twice")
        arms[name] = overrides

    for name in filter(None, map(str.strip, names.split(","))):
        if name not in ARMS:
            near = difflib.get_close_matches(name, ARMS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(ARMS)}"
            raise UserError(f"--arms: unknown arm '{name}': {hint} (or give your own with --arm)")
        add(name, ARMS[name][0])
    for text in free:
        name, colon, rest = text.partition(":")
        pairs = [word.partition("=") for word in shlex.split(rest)]
        if not colon or not re.fullmatch(r"[\w.+=-]+", name) or not all(equals for _, equals, _ in pairs):
            raise UserError(f"--arm '{text}': give a name and what it changes, such as 'loud: wm.scale=10 wm.loss=mae'")
        add(name, {key: value for key, _, value in pairs})
    if not arms:
        raise UserError("--arms names no arm")
    return arms


def listing() -> str:
    """All named arms, one a line."""
    changes = {name: " ".join(f"{key}={value}" for key, value in keys.items()) for name, (keys, _) in ARMS.items()}
    return "\n".join(f"{name:12} {what}\n{'':12} {changes[name]}" for name, (_, what) in ARMS.items())
