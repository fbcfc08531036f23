"""What a customer reads and how the answer becomes an action.

`PaperStyle` is Figure 8 of the paper, character for character as the reference code (verl-agent) sends it: the blanks
at two line ends and the non-breaking hyphen of "e-commerce" included.
"""

import functools
from collections.abc import Iterable
from string import ascii_lowercase as LETTERS

from paw.envs.tags import LATER, LineStyle, Past, TaggedStyle
from paw.envs.webshop.catalogue import Catalogue
from paw.envs.webshop.generator import WARES
from paw.envs.webshop.reward import Goal, Product
from paw.envs.webshop.session import BACK, BUY, NEXT, PREVIOUS, Session

# The blanks at line ends are the reference's: after "environment." (first turn alone), "are:" and "tags.".
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
"""Characters of a prompt above which the first turn's template, which has no history, takes its place."""


class PaperStyle(TaggedStyle):
    """Figure 8 of the paper. Without `history`, or where it is too long, every turn has the template of the first."""

    unparsed = 20
    advice = ", then think carefully which admissible action best advances the shopping goal"

    def observation(self, session: Session) -> str:
        return " [SEP] ".join(f"'{part}'" for part in session.parts)

    def actions(self, session: Session) -> dict[str, str]:
        """Name of each action that can be played now -> the session's own; searches in free words are not listed."""
        return {action: action for text in session.clickables if (action := f"click[{text}]") != "click[search]"}

    def prompt(self, session: Session, past: Past) -> str:
        values = {
            "task": session.goal.instruction.strip(),
            "observation": self.observation(session),
            "actions": "\n".join(f"'{action}'," for action in session.available()),
        }
        later = self.fill(LATER_TURN, past, **values)
        return later if past and self.history and len(later) <= LONGEST else self.fill(FIRST_TURN, past, **values)

    def queries(self, session: Session) -> list[str]:
        """What a buyer who knows the goal searches for, the shortest first."""
        goal, product = session.goal, session.goal.product
        long = " ".join([product.query, *goal.attributes, *goal.options.values()])
        return [product.query, long, product.title.lower()]


class CompactStyle(LineStyle):
    """The goal as a list, the last actions, the page, the actions. Names of several words are written as one
    ("easyAssemble"). The products of a page are lettered; each with its attributes and whether it is too expensive.
    """

    def observation(self, session: Session) -> str:
        product = session.product
        if product is not None:
            options = [f"{_one_word(name)}: {_words(values)}" for name, values in product.options.items()]
            chosen = [f"chosen: {_words(session.options.values())}"] if session.options else []
            return "\n".join([f"product: {_brief(product, session.goal)}", *options, *chosen])
        if session.searching:
            return "shop"
        listed = zip(LETTERS, session.listed, strict=False)
        return "\n".join([f"page {session.page}", *(f"{i}: {_brief(product, session.goal)}" for i, product in listed)])

    def actions(self, session: Session) -> dict[str, str]:
        if session.searching:
            return {f"search {name}": f"search[{words}]" for name, words in _searches(session.catalogue).items()}
        if session.product is None:
            listed = zip(LETTERS, session.listed, strict=False)
            named = {f"open {i}": product.asin.lower() for i, product in listed} | {"next": NEXT, "previous": PREVIOUS}
        else:
            values = [value for values in session.product.options.values() for value in values]
            named = {**{f"pick {_one_word(value)}": value for value in values}, "buy": BUY, "previous": PREVIOUS}
        named["leave"] = BACK
        return {name: f"click[{text}]" for name, text in named.items() if text in session.clickables}

    def prompt(self, session: Session, past: Past) -> str:
        goal = session.goal
        picks = [f"pick {_one_word(value)}" for value in goal.options.values()]
        task = ["task:", f"search {_one_word(goal.product.query)}", f"with {_words(goal.attributes)}", *picks]
        return self.fill(task, past, self.observation(session), self.actions(session))

    def queries(self, session: Session) -> list[str]:
        return [_searches(session.catalogue)[_one_word(session.goal.product.query)]]


Style = PaperStyle | CompactStyle


@functools.lru_cache(8)
def _searches(catalogue: Catalogue) -> dict[str, str]:
    """The types of product that a shop has, as one word each, and the words that find all of one."""
    known = {ware.query: ware.nouns for ware in WARES}  # titles call a thing by one of these names
    types = sorted({product.query for product in catalogue.products})
    return {_one_word(name): " ".join([name, *known.get(name, ())]) for name in types}


def _brief(product: Product, goal: Goal) -> str:
    return _words(product.attributes) + (" dear" if product.price > goal.price_upper else "")


def _words(names: Iterable[str]) -> str:
    return " ".join(map(_one_word, names))


def _one_word(name: str) -> str:
    """ "easy assemble" -> "easyAssemble"."""
    first, *others = name.split()
    return first + "".join(word[0].upper() + word[1:] for word in others)
