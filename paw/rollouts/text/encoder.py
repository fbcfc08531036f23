"""Text to token ids. Text becomes a control token only if the caller asks for it.

Environments and models may write "<|im_end|>". In their texts it stands for the ordinary characters
that it consists of.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from tokenizers import Tokenizer


class Encoder:
    """Encodes with `backend`. `control` has the ids of tokens that no text may become.

    `markers` are ordinary words that a template uses to mark turns ("[INST]").
    """

    def __init__(
        self, backend: Tokenizer, *, control: frozenset[int], markers: Iterable[str] = ()
    ) -> None:
        words = control_words(backend, control)
        self.control = control
        self.control_pattern = any_of(words)
        """A pattern that matches control tokens as they are written."""
        self._backend = backend
        self._spelling_cuts = _spelling_cuts(words)
        self._markers = any_of(markers)

    def encode(self, text: str) -> list[int]:
        """Return ids of a text, including the control tokens that it spells."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def plain_ids(self, text: str) -> list[int]:
        """Return ids of a text, with every control token in it spelt out."""
        return [token for token, _ in self.plain_tokens(text)]

    def plain_tokens(self, text: str) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (id, characters [start, end) it covers) of a text, control tokens spelt out."""
        piece_start = 0
        for piece in self._spelling_cuts.split(text):
            encoding = self._backend.encode(piece, add_special_tokens=False)
            for token, (first_character, end_character) in zip(
                encoding.ids, encoding.offsets, strict=True
            ):
                # A control token of one character, or one that appears only after normalisation,
                # cannot be spelt out. It is left out.
                if token not in self.control:
                    yield token, (piece_start + first_character, piece_start + end_character)
            piece_start += len(piece)

    def controls(self, ids: Iterable[int]) -> list[int]:
        """Return the control tokens among `ids`."""
        return [token for token in ids if token in self.control]

    def harmless(self, text: str) -> str:
        """Return `text`, encodable and without turn markers. Its length is the same.

        The first character of each marker becomes a space.
        """
        text = encodable(text)
        while True:
            cleaned = self._markers.sub(lambda match: " " + match[0][1:], text)
            if cleaned == text:
                return text
            text = cleaned  # removing one marker may create another

    def is_harmless(self, text: str) -> bool:
        """Whether `text` is free of control tokens and turn markers."""
        return not self.controls(self.encode(text)) and self.harmless(text) == text


def control_words(backend: Tokenizer, control: Iterable[int]) -> set[str]:
    """Return the control tokens as they are written."""
    words = {backend.id_to_token(token) or "" for token in control}
    return words - {""}


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the words, longest first, or nothing without words."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def encodable(text: str) -> str:
    """Replace lone surrogates in `text`, which no tokenizer accepts, with question marks."""
    return text.encode("utf-8", "replace").decode()


def _spelling_cuts(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of each control token's first character. Cutting text after it breaks it up.

    The tokenizer's `split_special_tokens` misses those that were added without the special flag.
    """
    longer_words = sorted(control_word for control_word in words if len(control_word) > 1)
    cuts: list[str] = []
    for first_character, same_first in groupby(longer_words, key=itemgetter(0)):
        rests = "|".join(re.escape(control_word[1:]) for control_word in same_first)
        cuts.append(f"(?<={re.escape(first_character)})(?={rests})")
    return re.compile("|".join(cuts) or r"(?!)")
