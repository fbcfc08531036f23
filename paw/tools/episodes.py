"""Sample episodes for the report: which are shown, and for each turn the observation's tokens and the model's guess."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

PER_END = 3
"""Episodes shown of the first and of the last sampled update."""
EPISODE_CHARS, TEXT_CHARS, MAX_TOKENS = 100_000, 4_000, 600
"""Of the texts of an episode, of one text, and tokens of an observation that are shaded: the page stays small."""


def pick_episodes(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Up to `PER_END` episodes of the first sampled update and of the last, the same tasks in both where there are.

    The first of the last update gets "open".
    """
    samples = [s for s in samples if type(s.get("step")) is int and isinstance(s.get("turns"), list)]
    steps = sorted(s["step"] for s in samples)
    early = [s for s in samples if s["step"] == steps[0]][:PER_END]
    late = [s for s in samples if s["step"] == steps[-1] > steps[0]]
    tasks = {str(s.get("task")) for s in early}
    picked = early + sorted(late, key=lambda s: str(s.get("task")) not in tasks)[:PER_END]
    first_late = len(early) if late else 0
    return [s | {"open": i == first_late} for i, s in enumerate(picked)]


def shown_episode(sample: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a record of samples.jsonl, anything of which may be missing or of another type."""
    turns = [turn for turn in sample["turns"] if isinstance(turn, dict)]
    shown, size = [], 0
    while len(shown) < len(turns) and size <= EPISODE_CHARS:
        shown.append(_turn(turns[len(shown)]))
        size += sum(len(text) for text, _ in shown[-1]["tokens"]) + 50 * len(shown[-1]["tokens"])
        size += sum(len(clip(shown[-1][key])) for key in ("prompt", "response", "action"))
    return {
        "step": sample["step"],
        "task": sample.get("task", ""),
        "kind": sample.get("kind", ""),
        "won": sample.get("won"),
        "reward": sample.get("return"),
        "total": sample["length"] if type(sample.get("length")) is int else len(turns),
        "turns": shown,
        "open": sample["open"],
    }


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    texts = {key: str(turn.get(key) or "") for key in ("prompt", "action", "response", "observation")}
    guess, real = turn.get("predicted"), texts["observation"]
    return texts | {
        "selected": turn.get("selected"),
        "valid": turn.get("valid"),
        "entropy": turn.get("entropy"),
        "tokens": list(_shaded(real, turn.get("observation_tokens"), turn.get("observation_token_p"))),
        "predicted": None if guess is None else list(_compared(str(guess), real)),
        "exact": guess is not None and str(guess).strip() == real.strip(),
    }


def _compared(predicted: str, observation: str) -> Iterator[tuple[str, bool]]:
    """The model's greedy guess in pieces: (text, whether it differs from the real one)."""
    words, real = (re.findall(r"\s+|\S+", clip(text.strip())) for text in (predicted, observation))
    for tag, low, high, _, _ in difflib.SequenceMatcher(None, words, real, autojunk=False).get_opcodes():
        if low < high:
            yield "".join(words[low:high]), tag != "equal"


def _shaded(observation: str, tokens: Any, probabilities: Any) -> Iterator[tuple[str, float | None]]:
    """The observation in pieces: (text, its probability where it is a token that has one)."""
    at = 0
    if isinstance(tokens, list) and isinstance(probabilities, list):
        for token, p in zip(tokens[:MAX_TOKENS], probabilities, strict=False):
            text = str(token).replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")
            if not observation.startswith(text, at):
                # Word-level tokens come without their spaces: find the token nearby, and show the space before it.
                text = text.strip() or text
            found = observation.find(text, at, at + len(text) + 16)
            if found >= 0:
                if (gap := observation[at:found]).isspace():
                    yield gap, None
                at = found + len(text)
            known = type(p) in (int, float) and 0 <= p <= 1
            yield text, p if known else None
    if observation[at:]:
        yield clip(observation[at:]), None


def clip(text: object) -> str:
    text = str(text)
    return text if len(text) <= TEXT_CHARS else text[:TEXT_CHARS] + " …"
