"""Makes the text that the agent reads as a customer, and parses its response.

`PaperStyle` is Figure 8 of the paper, character for character as the reference code (verl-agent)
sends it, including the blanks at line ends and the non-breaking hyphen of "e-commerce".
"""

import functools
from collections.abc import Iterable
from string import ascii_lowercase as LETTERS

from paw.envs.tags import LATER, LineStyle, Past, TaggedStyle
from paw.envs.webshop.catalogue import Catalogue
from paw.envs.webshop.generator import WARES
from paw.envs.webshop.reward import Goal, Product
from paw.envs.webshop.session import BACK, BUY, NEXT, PREVIOUS, Session

# The blanks at line ends come from the reference. They follow "environment." (only in the first
# turn), "are:" and "tags.".
HEAD = "\nYou are an expert autonomous agent operating in the WebShop e\u2011commerce environment."
TASK = "\nYour task is to: {task}.\n"
ACTIONS = """\
our current observation is: {observation}.
Your admissible actions of the current situation are:\x20
[
{actions}
].

Now it's your turn to take one action for the current step.
{instruction}
"""
FIRST_TURN = f"{HEAD} {TASK}Y{ACTIONS}"
LATER_TURN = f"{HEAD}{TASK}{LATER}{ACTIONS}"
LONGEST = 13_000
"""A prompt with more characters is replaced by the first turn's template, without history."""


class PaperStyle(TaggedStyle):
    """Figure 8 of the paper.

    With `history` 0, or if the prompt would be too long, the first turn's template is used.
    """

    unparsed = 20
    advice = ", then think carefully which admissible action best advances the shopping goal"

    def observation(self, session: Session) -> str:
        return " [SEP] ".join(f"'{part}'" for part in session.parts)

    def actions(self, session: Session) -> dict[str, str]:
        """Return, by name, the session's action for each action that can be played now.

        Searches are not listed, because the agent chooses their words.
        """
        actions = [f"click[{text}]" for text in session.clickables if text != "search"]
        return {action: action for action in actions}

    def prompt(self, session: Session, past: Past) -> str:
        values = {
            "task": session.goal.instruction.strip(),
            "observation": self.observation(session),
            "actions": "\n".join(f"'{action}'," for action in session.available()),
        }
        if past and self.history:
            prompt = self.fill(LATER_TURN, past, **values)
            if len(prompt) <= LONGEST:
                return prompt
        return self.fill(FIRST_TURN, past, **values)

    def queries(self, session: Session) -> list[str]:
        """Return what a buyer who knows the goal may search for, the shortest query first."""
        goal = session.goal
        product = goal.product
        with_wishes = " ".join([product.query, *goal.attributes, *goal.options.values()])
        return [product.query, with_wishes, product.title.lower()]


class CompactStyle(LineStyle):
    """A short prompt for small models: the goal as a list, the last actions, the page, the actions.

    Names of several words are written as one ("easyAssemble"). The products on a page are lettered,
    each with its attributes, and "dear" if it is too expensive.
    """

    def observation(self, session: Session) -> str:
        if session.searching:
            return "shop"
        product = session.product
        if product is None:
            lines = [f"page {session.page}"]
            for letter, listed in zip(LETTERS, session.listed, strict=False):
                lines.append(f"{letter}: {_brief(listed, session.goal)}")
            return "\n".join(lines)
        lines = [f"product: {_brief(product, session.goal)}"]
        lines += [
            f"{_one_word(name)}: {_words(values)}" for name, values in product.options.items()
        ]
        if session.options:
            lines.append(f"chosen: {_words(session.options.values())}")
        return "\n".join(lines)

    def actions(self, session: Session) -> dict[str, str]:
        if session.searching:
            return {
                f"search {name}": f"search[{words}]"
                for name, words in _searches(session.catalogue).items()
            }
        if session.product is None:
            listed = zip(LETTERS, session.listed, strict=False)
            clicks = {f"open {letter}": product.asin.lower() for letter, product in listed}
            clicks |= {"next": NEXT, "previous": PREVIOUS}
        else:
            values = [value for values in session.product.options.values() for value in values]
            clicks = {f"pick {_one_word(value)}": value for value in values}
            clicks |= {"buy": BUY, "previous": PREVIOUS}
        clicks["leave"] = BACK
        return {
            name: f"click[{text}]" for name, text in clicks.items() if text in session.clickables
        }

    def prompt(self, session: Session, past: Past) -> str:
        goal = session.goal
        picks = [f"pick {_one_word(value)}" for value in goal.options.values()]
        task = [
            "task:",
            f"search {_one_word(goal.product.query)}",
            f"with {_words(goal.attributes)}",
            *picks,
        ]
        return self.fill(task, past, self.observation(session), self.actions(session))

    def queries(self, session: Session) -> list[str]:
        return [_searches(session.catalogue)[_one_word(session.goal.product.query)]]


Style = PaperStyle | CompactStyle


@functools.lru_cache(8)
def _searches(catalogue: Catalogue) -> dict[str, str]:
    """Return the words that find all products of a type, by the type's name as one word."""
    nouns = {ware.query: ware.nouns for ware in WARES}  # each title contains one of them
    types = sorted({product.query for product in catalogue.products})
    return {_one_word(name): " ".join([name, *nouns.get(name, ())]) for name in types}


def _brief(product: Product, goal: Goal) -> str:
    """Return the product's attributes, and "dear" if it is above the goal's price limit."""
    text = _words(product.attributes)
    if product.price > goal.price_upper:
        text += " dear"
    return text


def _words(names: Iterable[str]) -> str:
    return " ".join(map(_one_word, names))


def _one_word(name: str) -> str:
    """ "easy assemble" -> "easyAssemble"."""
    first, *others = name.split()
    return first + "".join(word[0].upper() + word[1:] for word in others)
