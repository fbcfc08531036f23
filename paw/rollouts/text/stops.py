"""Stop strings. A response ends at the first one that it contains."""

from collections.abc import Sequence

from paw.rollouts.text.chat import Chat

TAIL = 8
"""Extra tokens decoded, beyond the number of characters in a stop string.

One character may take several tokens.
"""


class StopStrings:
    """Finds the strings `stop` in the tokens of a response.

    Engines call it to find out when to stop sampling.
    """

    def __init__(self, chat: Chat, stop: Sequence[str]) -> None:
        self._chat = chat
        self._stop = stop

    def __call__(self, ids: list[int]) -> bool:
        """Whether the last tokens contain one of the strings."""
        longest = max(len(stop_string) for stop_string in self._stop)
        tail = self._chat.decode(ids[-longest - TAIL :])
        return any(stop_string in tail for stop_string in self._stop)

    def first(self, ids: list[int]) -> tuple[int, str]:
        """Return (number of tokens up to the one that completes the first stop string, that
        string).

        Returns (number of all tokens, "") if there is no stop string.
        """
        _, stop = cut_at(self._chat.decode(ids), self._stop)
        if not stop:
            return len(ids), ""

        without = 0  # the first `without` tokens do not contain the stop string
        containing = len(ids)  # the first `containing` tokens do
        while containing - without > 1:
            middle = (without + containing) // 2
            if stop in self._chat.decode(ids[:middle]):
                containing = middle
            else:
                without = middle
        return containing, stop


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return (the text before the first stop string, that string); (all, "") without one.

    >>> cut_at("go on<end> or <stop>", ["<stop>", "<end>"])
    ('go on', '<end>')
    """
    matches = [(text.find(stop_string), stop_string) for stop_string in stop if stop_string in text]
    if not matches:
        return text, ""
    position, stop_string = min(matches)
    return text[:position], stop_string


def text_before(text: str, stop_string: str) -> str:
    """Return the text before the stop string that ended it; all of it if `stop_string` is ""."""
    return text.partition(stop_string)[0] if stop_string else text
