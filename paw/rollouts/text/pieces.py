"""The text of single tokens, as they stand in a longer text."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a decoder writes for the bytes of an incomplete character."""
CHARACTER_TOKENS = 4
"""Most tokens that one character consists of, as UTF-8 has at most four bytes."""


class TokenTexts:
    """Gives the text of each token of a sequence, so that together they are its text.

    A token's text may depend on the token before it: some tokenizers write a space between two
    words. So texts are remembered by pair, which makes them cheap in play that repeats itself.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._by_pair: dict[tuple[int, int], str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. If several make up a character, the first one has it."""
        texts: list[str] = []
        previous = -1
        for token in ids:
            text = self._by_pair.get((previous, token))
            if text is None:
                text = self._text_after(previous, token)
                self._by_pair[previous, token] = text
            texts.append(text)
            previous = token
        _join_characters(texts, ids, self._decode)
        return texts

    def _text_after(self, previous: int, token: int) -> str:
        """Return the text of a token after another one; -1 if it is the first."""
        if previous >= 0:
            before = self._decode([previous])
            both = self._decode([previous, token])
            if before and both.startswith(before):
                return both[len(before) :]
        return self._decode([token])


def _join_characters(
    texts: list[str], ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> None:
    """Give each character that several tokens make up to the first of them."""
    start = 0
    while start < len(texts):
        last = min(start + CHARACTER_TOKENS, len(texts))
        joined_end = start + 1
        if REPLACEMENT in texts[start]:
            for end in range(start + 2, last + 1):
                text = decode(ids[start:end])
                if REPLACEMENT not in text:
                    texts[start:end] = [text, *[""] * (end - start - 1)]
                    joined_end = end
                    break
        start = joined_end
