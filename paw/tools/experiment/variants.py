"""The variants of a comparison: a name, what it changes in the recipe, and a line on what it is."""

import difflib
import re
import shlex

from paw.errors import UserError

Overrides = dict[str, str]
"""Dotted keys of the configuration and their values, as on the command line."""
GRPO = {"advantage.type": "grpo", "wm.enabled": "false"}
PAW = {"advantage.type": "grpo", "wm.enabled": "true"}
ESTIMATORS: dict[str, Overrides] = {
    "rloo": {"advantage.type": "rloo"},
    "gigpo": {"advantage.type": "gigpo"},
    "dr-grpo": {"advantage.type": "grpo", "advantage.norm_std": "false"},
    "ppo": {"advantage.type": "ppo"},
}
VARIANTS: dict[str, tuple[Overrides, str]] = {
    "grpo": (GRPO, "GRPO without a world model"),
    "paw": (PAW, "GRPO + PaW, with the recipe's [wm] (the paper's where it says nothing else)"),
    "ce": (PAW | {"wm.loss": "ce"}, "cross-entropy on observations, as in Table 4"),
    "mae": (PAW | {"wm.loss": "mae"}, "MAE without the mask p <= rho"),
    "gce": (PAW | {"wm.loss": "gce"}, "generalised cross-entropy"),
    "constant": (PAW | {"wm.weight": "1.0"}, "lambda = 1 whatever the rewards, as in Table 4"),
    "unselected": (PAW | {"wm.alpha": "1.0"}, "every turn a target, no selection by entropy"),
    "echo": (PAW | {"wm.loss": "ce", "wm.weight": "1.0", "wm.alpha": "1.0"}, "ECHO (arXiv 2605.24517)"),
    "scaled": (PAW | {"wm.scale": "10"}, "PaW's term ten times as large"),
    "dedup": (PAW | {"wm.dedup": "true"}, "identical turns predicted once"),
    **{name: (keys | {"wm.enabled": "false"}, f"{name} without a world model") for name, keys in ESTIMATORS.items()},
    **{f"{name}-paw": (keys | {"wm.enabled": "true"}, f"{name} + PaW") for name, keys in ESTIMATORS.items()},
}


def parse_variants(names: str, own: list[str]) -> dict[str, Overrides]:
    """Variants by name from "grpo,paw", then the user's own, each "name: wm.scale=10 wm.loss=mae".

    Raises UserError for an unknown or repeated name and for an own variant of another form.
    """
    found: list[tuple[str, Overrides]] = []
    for name in filter(None, map(str.strip, names.split(","))):
        if name not in VARIANTS:
            near = difflib.get_close_matches(name, VARIANTS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(VARIANTS)}"
            raise UserError(f"--variants: unknown variant '{name}': {hint} (or give your own with --variant)")
        found.append((name, VARIANTS[name][0]))
    for text in own:
        name, colon, rest = text.partition(":")
        pairs = [word.partition("=") for word in shlex.split(rest)]
        if not colon or not re.fullmatch(r"[\w.+=-]+", name) or not all(equals for _, equals, _ in pairs):
            example = "'loud: wm.scale=10 wm.loss=mae'"
            raise UserError(f"--variant '{text}': give a name and what it changes, such as {example}")
        found.append((name, {key: value for key, _, value in pairs}))
    if not found:
        raise UserError("--variants names no variant")
    chosen = [name for name, _ in found]
    if twice := next((name for name in chosen if chosen.count(name) > 1), None):
        raise UserError(f"variant '{twice}' is there twice")
    return dict(found)


def listing() -> str:
    """All named variants: two lines each."""
    changes = {name: " ".join(f"{key}={value}" for key, value in keys.items()) for name, (keys, _) in VARIANTS.items()}
    return "\n".join(f"{name:12} {what}\n{'':12} {changes[name]}" for name, (_, what) in VARIANTS.items())
