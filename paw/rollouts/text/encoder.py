"""Text to token ids in which no text becomes a control token unless the caller wants it to.

Environments and models may write "<|im_end|>": in their texts it stands for the ordinary characters
that it consists of.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from tokenizers import Tokenizer


class Encoder:
    """Encodes with `backend`; `control` are the ids of the tokens that no text may become.

    `markers` are ordinary words by which a template marks turns ("[INST]").
    """

    def __init__(
        self, backend: Tokenizer, *, control: frozenset[int], markers: Iterable[str] = ()
    ) -> None:
        words = control_words(backend, control)
        self.control = control
        self.control_pattern = any_of(words)
        """A control token as it is written."""
        self._backend = backend
        self._spelling_cuts = _spelling_cuts(words)
        self._markers = any_of(markers)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, including the control tokens that it writes."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def plain_ids(self, text: str) -> list[int]:
        """Ids of a text, every control token in it spelt out."""
        return [token for token, _ in self.plain_tokens(text)]

    def plain_tokens(self, text: str) -> Iterator[tuple[int, tuple[int, int]]]:
        """(id, characters [start, end) it stands for) of a text, control tokens spelt out."""
        piece_start = 0
        for piece in self._spelling_cuts.split(text):
            encoding = self._backend.encode(piece, add_special_tokens=False)
            for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
                # A control token of one character, or one that only appears after normalisation,
                # cannot be spelt out: it is left out.
                if token not in self.control:
                    yield token, (piece_start + first, piece_start + last)
            piece_start += len(piece)

    def controls(self, ids: Iterable[int]) -> list[int]:
        """The control tokens among `ids`."""
        return [token for token in ids if token in self.control]

    def harmless(self, text: str) -> str:
        """`text` as a tokenizer takes it and without markers of turns; its length is the same.

        The first character of each marker becomes a space.
        """
        text = encodable(text)
        while True:
            cleaned = self._markers.sub(lambda match: " " + match[0][1:], text)
            if cleaned == text:
                return text
            text = cleaned  # another marker may appear where one was

    def is_harmless(self, text: str) -> bool:
        """Whether `text` has no control token and no marker of a turn."""
        return not self.controls(self.encode(text)) and self.harmless(text) == text


def control_words(backend: Tokenizer, control: Iterable[int]) -> set[str]:
    """The control tokens as they are written."""
    words = {backend.id_to_token(token) or "" for token in control}
    return words - {""}


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of the words, the longest first; nothing if there are no words."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def encodable(text: str) -> str:
    """`text` with question marks for lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _spelling_cuts(words: Iterable[str]) -> re.Pattern[str]:
    """Where to cut text so that no piece has a control token: after the first character of each.

    The tokenizer's `split_special_tokens` misses those that were added without the special flag.
    """
    longer_words = sorted(word for word in words if len(word) > 1)
    cuts: list[str] = []
    for first, same_first in groupby(longer_words, key=itemgetter(0)):
        rests = "|".join(re.escape(word[1:]) for word in same_first)
        cuts.append(f"(?<={re.escape(first)})(?={rests})")
    return re.compile("|".join(cuts) or r"(?!)")
