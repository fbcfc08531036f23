"""The episodes of a run as the page shows them: rows of a table, and single episodes in full.

The report embeds both in its page, and `paw view` sends them when they are asked for. They come
from episodes.jsonl (training) and samples.jsonl (evaluation). Any part of a line may be missing or
have another type, and all text is cleaned of characters that no page should show.
"""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paw.errors import clean
from paw.io.files import json_object, update_of
from paw.tools.report.lines import LineFile

FILES = {"evaluation": "samples.jsonl", "training": "episodes.jsonl"}
"""The file of each kind of play."""
PAGE_BYTES = 4_000_000
"""Approximate maximum bytes of episodes in a report. Others are left out, evenly over updates."""
EPISODE_CHARS = 100_000
"""Maximum characters of an episode's texts. This keeps the page small."""
TEXT_CHARS = 4_000
"""Maximum characters of one text."""
ROW_CHARS = 400
"""Maximum characters of a row's actions, in which the table searches."""
NAME_CHARS = 300
"""Maximum characters of a task's name, or of its kind."""
MAX_TOKENS = 2_048
"""Maximum tokens of a response."""
SHADED_TOKENS = 600
"""Maximum shaded tokens per observation."""

Row = dict[str, Any]
Detail = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where an episode's line is."""

    split: str
    """A key of FILES."""
    start: int
    """Byte offset."""
    size: int
    """Bytes."""


@dataclass
class EpisodeIndex:
    """The rows of a run's episodes, read as far as they are written. Lines stay in their files."""

    directory: Path
    rows: list[Row] = field(default_factory=list)
    """In the order in which they were read."""
    places: dict[str, Place] = field(default_factory=dict)
    """Where each row's line is, by the row's id."""
    generation: int = 0
    """Counts how often earlier rows became invalid, as after a resume."""
    unreadable: int = 0
    """Number of lines that are not episodes."""
    _files: dict[str, LineFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start_over()

    def _start_over(self) -> None:
        self._files = {split: LineFile(self.directory / name) for split, name in FILES.items()}
        self.rows = []
        self.places = {}
        self.unreadable = 0

    def update(self) -> None:
        """Read what was appended. If a file was cut back or replaced, read everything again."""
        new_lines: list[tuple[str, int, bytes]] = []
        for split, file in self._files.items():
            changed, lines = file.read_new()
            if changed:
                self.generation += 1
                self._start_over()
                self.update()
                return
            new_lines += [(split, start, line) for start, line in lines]
        for split, start, line in new_lines:
            record = json_object(line)
            if record is None:
                self.unreadable += 1
                continue
            if update_of(record) is None or not isinstance(record.get("turns"), list):
                continue
            row = row_of(record, split=split, start=start)
            self.rows.append(row)
            self.places[row["id"]] = Place(split, start, len(line))

    @property
    def damaged(self) -> int:
        """Number of lines that are not episodes, with those that a crash has cut off."""
        incomplete = sum(bool(file.incomplete_line) for file in self._files.values())
        return self.unreadable + incomplete

    def detail(self, row_id: str) -> Detail | None:
        """Return an episode in full, or None if there is none with this id."""
        place = self.places.get(row_id)
        if place is None:
            return None
        try:
            with (self.directory / FILES[place.split]).open("rb") as file:
                file.seek(place.start)
                record = json_object(file.read(place.size))
        except OSError:
            return None
        if record is None or not isinstance(record.get("turns"), list):
            return None
        return detail_of(record)


def embedded(index: EpisodeIndex, limit: int = PAGE_BYTES) -> tuple[list[Row], dict[str, Detail]]:
    """Return the rows that fit into a page of about `limit` bytes, with their episodes by id.

    If not all fit, they are spread evenly over the run, and include its first and last.
    """
    # Only the first turns of a long line are shown.
    whole_size = sum(min(place.size, 2 * EPISODE_CHARS) for place in index.places.values())
    order = sorted(range(len(index.rows)), key=lambda i: (index.rows[i]["step"], i))
    episode_count = len(order)
    if whole_size > limit:
        episode_count = max(2, int(episode_count * limit / whole_size))
    rows: list[Row] = []
    details: dict[str, Detail] = {}
    for i in spread(len(order), episode_count):
        row = index.rows[order[i]]
        detail = index.detail(row["id"])
        if detail is not None:
            rows.append(row)
            details[row["id"]] = detail
    return rows, details


def spread(count: int, chosen: int) -> list[int]:
    """Return `chosen` of the indices 0 to count - 1, evenly spread, with the first and the last.

    >>> spread(10, 4)
    [0, 3, 6, 9]
    """
    if chosen >= count:
        return list(range(count))
    if chosen == 1:
        return [count - 1]
    return [round(i * (count - 1) / (chosen - 1)) for i in range(chosen)]


def row_of(record: dict[str, Any], *, split: str, start: int) -> Row:
    """Return the row of an episode in the table."""
    turns = [turn for turn in record["turns"] if isinstance(turn, dict)]
    actions = " · ".join(str(turn.get("action") or "") for turn in turns[:100])
    group = record.get("group")
    row: Row = {
        "id": f"{split}-{start}",
        "split": split,
        "step": update_of(record),
        "task": _text(record.get("task"), NAME_CHARS),
        "kind": _text(record.get("kind"), NAME_CHARS),
        "won": bool(record["won"]) if record.get("won") is not None else None,
        "return": _number(record.get("return")),
        "turns": record["length"] if type(record.get("length")) is int else len(turns),
        "actions": _text(actions, ROW_CHARS),
    }
    if isinstance(group, dict) and type(group.get("size")) is int and type(group.get("won")) is int:
        row["group"] = f"{group['won']} of {group['size']}"
    return row


def detail_of(record: dict[str, Any]) -> Detail:
    """Return an episode as the page opens it: at most EPISODE_CHARS of its turns."""
    turns = [turn for turn in record["turns"] if isinstance(turn, dict)]
    shown: list[Detail] = []
    characters = 0
    for turn in turns:
        if characters > EPISODE_CHARS:
            break
        shown_turn = _turn(turn)
        shown.append(shown_turn)
        characters += _size(shown_turn)
    turn_count = record["length"] if type(record.get("length")) is int else len(turns)
    detail: Detail = {"turns": shown, "total": max(turn_count, len(shown))}
    if record.get("prompt"):
        detail["prompt"] = _text(record["prompt"], 2 * TEXT_CHARS)
    return detail


def _turn(turn: dict[str, Any]) -> Detail:
    """Return a turn: texts, tokens with their numbers, and the prediction of the observation."""
    observation = _text(turn.get("observation"), TEXT_CHARS)
    shown: Detail = {
        "action": _text(turn.get("action"), TEXT_CHARS),
        "tokens": [_text(turn.get("response"), TEXT_CHARS)],
        "observation": _observation(turn, observation),
    }
    if isinstance(turn.get("tokens"), list):
        shown["tokens"] = [_token(token) for token in turn["tokens"][:MAX_TOKENS]]
        shown["p"] = [_probability(value) for value in _numbers(turn.get("logp"))]
        shown["entropy"] = _numbers(turn.get("token_entropy", turn.get("entropy")))
    if turn.get("prompt"):
        shown["prompt"] = _text(turn["prompt"], TEXT_CHARS)
    if isinstance(turn.get("advantage"), list):
        shown["advantage"] = _numbers(turn["advantage"])
    else:
        shown["advantage"] = _number(turn.get("advantage"))
    for key in ("valid", "selected"):
        if isinstance(turn.get(key), bool):
            shown[key] = turn[key]
    entropy = _number(turn.get("entropy"))
    if entropy is not None:
        shown["mean_entropy"] = entropy

    prediction = turn.get("predicted")
    if prediction is not None:
        predicted = _text(prediction, TEXT_CHARS)
        shown["predicted"] = list(_compared(predicted, observation))
        shown["exact"] = predicted.strip() == observation.strip()
    return shown


def _observation(turn: dict[str, Any], observation: str) -> list[list[Any]]:
    """Return the observation in pieces: [text, its probability or None]."""
    probabilities = turn.get("observation_token_p")
    if isinstance(turn.get("observation_logp"), list):
        probabilities = [_probability(value) for value in _numbers(turn["observation_logp"])]
    pieces = _shaded(observation, turn.get("observation_tokens"), probabilities)
    return [[text, probability] for text, probability in pieces]


def _shaded(
    observation: str, tokens: Any, probabilities: Any
) -> Iterator[tuple[str, float | None]]:
    """Yield the observation in pieces: (text, its probability if it is a token that has one)."""
    shown_end = 0  # end of the part of the observation that has been yielded
    if isinstance(tokens, list) and isinstance(probabilities, list):
        for token, probability in zip(tokens[:SHADED_TOKENS], probabilities, strict=False):
            text = _token(token).replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")
            if not observation.startswith(text, shown_end):
                # Word-level tokens come without their spaces. Find the token nearby, and show the
                # space before it.
                text = text.strip() or text

            text_start = observation.find(text, shown_end, shown_end + len(text) + 16)
            if text_start >= 0:
                gap = observation[shown_end:text_start]
                if gap.isspace():
                    yield gap, None
                shown_end = text_start + len(text)

            is_probability = type(probability) in (int, float) and 0 <= probability <= 1
            yield text, probability if is_probability else None

    remainder = observation[shown_end:]
    if remainder:
        yield remainder, None


def _compared(predicted: str, observation: str) -> Iterator[tuple[str, bool]]:
    """Yield the greedy prediction in pieces: (text, whether the real observation differs)."""
    predicted_words = _words(predicted)
    matcher = difflib.SequenceMatcher(None, predicted_words, _words(observation), autojunk=False)
    for tag, low, high, _, _ in matcher.get_opcodes():
        if low < high:
            yield "".join(predicted_words[low:high]), tag != "equal"


def _words(text: str) -> list[str]:
    """Split a text into words and the spaces between them."""
    return re.findall(r"\s+|\S+", text.strip())


def _size(turn: Detail) -> int:
    """Return about how many characters a turn takes in the page."""
    pieces = len(turn["tokens"]) + len(turn["observation"])
    characters = sum(map(len, turn["tokens"]))
    characters += sum(len(text) for text, _ in turn["observation"])
    return 20 * pieces + characters + len(turn.get("prompt", ""))


def _text(value: object, limit: int) -> str:
    """Return a text without control characters, cut to `limit` characters."""
    return "" if value is None else clean(value, limit, lines=True)


def _token(value: object) -> str:
    text = str(value)
    if text.isascii() and text.isprintable() and len(text) <= NAME_CHARS:
        return text  # nearly all tokens, of which there are many
    return clean(text, NAME_CHARS, lines=True)


def _number(value: object) -> float | None:
    """Return a finite number, None for anything else."""
    if type(value) in (int, float) and math.isfinite(value):  # type: ignore[arg-type]
        return value  # type: ignore[return-value]
    return None


def _numbers(values: object) -> list[float | None]:
    if not isinstance(values, list):
        return []
    return [_number(value) for value in values[:MAX_TOKENS]]


def _probability(logp: float | None) -> float | None:
    if logp is None:
        return None
    return round(math.exp(min(logp, 0.0)), 4)
