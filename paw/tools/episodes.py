"""Sample episodes as HTML: each action, the real next observation shaded by the model's surprise, and its own guess.

Everything shown was written by a model or an environment, so every string passes `esc`.
"""

import difflib
import html
import re
from collections.abc import Sequence
from typing import Any, TypeGuard

from paw.errors import clean

PER_END = 3
"""Episodes shown of the first and of the last sampled update."""
EPISODE_BYTES = 200_000
TEXT_CHARS = 4_000
MAX_TOKENS = 600


def esc(value: object) -> str:
    """Any value as HTML text, also inside a quoted attribute, without the controls that no page should show."""
    return html.escape(clean(value, EPISODE_BYTES, lines=True))


def pick_episodes(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Up to `PER_END` episodes of the first sampled update and of the last, the same tasks in both where there are."""
    samples = [s for s in samples if type(s.get("step")) is int and isinstance(s.get("turns"), list)]
    steps = sorted(s["step"] for s in samples)
    early = [s for s in samples if s["step"] == steps[0]][:PER_END]
    late = [s for s in samples if s["step"] == steps[-1] > steps[0]]
    tasks = {str(s.get("task")) for s in early}
    return early + sorted(late, key=lambda s: str(s.get("task")) not in tasks)[:PER_END]


def episode_html(sample: dict[str, Any], *, rho: float | None, is_open: bool = False) -> str:
    """One collapsible episode; long ones are cut after `EPISODE_BYTES` and say so."""
    turns = [turn for turn in sample["turns"] if isinstance(turn, dict)]
    won, reward = sample.get("won"), sample.get("return")
    when = f"Update {sample['step']}" if sample["step"] else "Before training"
    outcome = "" if won is None else _badge("won", "good") if won else _badge("not won", "bad")
    total = sample["length"] if type(sample.get("length")) is int else len(turns)
    body, shown = "", 0
    while shown < len(turns) and len(body) <= EPISODE_BYTES:
        body += _turn(turns[shown], shown, rho)
        shown += 1
    if shown < total:
        body += f'<p class="note">The first {shown} of {total} turns.</p>'
    return (
        f'<details class="episode"{" open" if is_open else ""}><summary><b>{when}</b>'
        f"<span>{esc(sample.get('kind', ''))}</span>{outcome}"
        f'<span class="note">{total} turns · return {f"{reward:g}" if _is_number(reward) else "–"}</span>'
        f'<span class="task">{esc(sample.get("task", ""))}</span></summary>{body}</details>'
    )


def _turn(turn: dict[str, Any], index: int, rho: float | None) -> str:
    badges = _badge("selected", "pick") if turn.get("selected") else ""
    if turn.get("valid") is False:
        badges += _badge("invalid", "bad")
    if _is_number(entropy := turn.get("entropy")):
        badges += f'<span class="note">H {entropy:.2f} nats</span>'
    action, response = str(turn.get("action") or ""), str(turn.get("response") or "")
    parts = [f'<p class="action"><code>{esc(_clip(action)) or "–"}</code>{badges}</p>']
    if turn.get("prompt"):
        parts.insert(0, _folded("Prompt", turn["prompt"], is_open=index == 0))
    if response.strip() not in ("", action.strip()):
        parts.append(_folded("Response", response))
    observation = str(turn.get("observation") or "")
    real = f"<div><h4>Next observation</h4><pre>{_shaded(observation, turn, rho) or '–'}</pre></div>"
    if turn.get("predicted") is not None:
        real += _prediction(str(turn["predicted"]), observation)
    parts.append(f'<div class="pair">{real}</div>')
    return f'<section class="turn"><span class="index">{index + 1}</span><div>{"".join(parts)}</div></section>'


def _folded(title: str, text: object, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{title}</summary><pre>{esc(_clip(text))}</pre></details>"


def _prediction(predicted: str, observation: str) -> str:
    """The model's greedy guess, words that differ from the real text marked."""
    marked = badge = ""
    if predicted.strip() == observation.strip():
        marked, badge = esc(_clip(predicted)), _badge("exact", "good")
    else:
        words, real = (re.findall(r"\s+|\S+", _clip(text)) for text in (predicted, observation))
        for tag, low, high, _, _ in difflib.SequenceMatcher(None, words, real, autojunk=False).get_opcodes():
            text = esc("".join(words[low:high]))
            marked += f"<mark>{text}</mark>" if tag in ("replace", "delete") else text
    return f"<div><h4>Model's prediction {badge}</h4><pre>{marked or '–'}</pre></div>"


def _shaded(observation: str, turn: dict[str, Any], rho: float | None) -> str:
    """The observation with one `<i>` per token, darker the less probable, underlined where p <= rho."""
    tokens, probabilities = turn.get("observation_tokens"), turn.get("observation_token_p")
    if not isinstance(tokens, list) or not isinstance(probabilities, list):
        return esc(_clip(observation))
    out, at = "", 0
    for token, p in zip(tokens[:MAX_TOKENS], probabilities, strict=False):
        text = str(token).replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")
        if not observation.startswith(text, at):
            # Word-level tokens come without their spaces: find the token nearby, and show the space before it.
            text = text.strip() or text
        found = observation.find(text, at, at + len(text) + 16)
        if found >= 0:
            gap = observation[at:found]
            out += gap if gap.isspace() else ""
            at = found + len(text)
        if _is_number(p) and 0 <= p <= 1:
            kept = ' class="kept"' if rho is not None and p <= rho else ""
            out += f'<i{kept} style="--q:{1 - p:.2f}" title="p = {p:.3f}">{esc(text)}</i>'
        else:
            out += esc(text)
    return out + esc(_clip(observation[at:]) if at else "")


def _badge(text: str, look: str) -> str:
    return f'<span class="badge {look}">{text}</span>'


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float)


def _clip(text: object) -> str:
    text = str(text)
    return text if len(text) <= TEXT_CHARS else text[:TEXT_CHARS] + " …"
