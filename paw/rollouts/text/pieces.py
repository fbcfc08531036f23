"""The text of single tokens, as they stand in a longer text."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a decoder writes for the bytes of an incomplete character."""
CHARACTER_TOKENS = 4
"""Maximum number of tokens in a character, which has at most four bytes in UTF-8."""


class TokenTexts:
    """Gives the text of each token of a sequence, so that joining them gives the text of all.

    A token's text may depend on the token before it, because some tokenizers write a space between
    two words. So texts are cached by pair, which makes them cheap in episodes that repeat
    themselves.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._by_pair: dict[tuple[int, int], str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. If several make up a character, the first one gets it."""
        token_texts: list[str] = []
        previous = -1
        for token in ids:
            text = self._by_pair.get((previous, token))
            if text is None:
                text = self._text_after(previous, token)
                self._by_pair[previous, token] = text
            token_texts.append(text)
            previous = token
        _join_characters(token_texts, ids, self._decode)
        return token_texts

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
    token_start = 0
    while token_start < len(texts):
        last_end = min(token_start + CHARACTER_TOKENS, len(texts))
        joined_end = token_start + 1
        if REPLACEMENT in texts[token_start]:
            for character_end in range(token_start + 2, last_end + 1):
                text = decode(ids[token_start:character_end])
                if REPLACEMENT not in text:
                    texts[token_start:character_end] = [
                        text,
                        *[""] * (character_end - token_start - 1),
                    ]
                    joined_end = character_end
                    break
        token_start = joined_end
