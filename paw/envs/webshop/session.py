"""One visit to the shop: the pages, as text, and what each action does on them.

Source: web_agent_site/envs/web_agent_text_env.py of WebShop (`step`, `get_available_actions`, `SimServer.receive`); its
search commands for debugging are ordinary words here. A page is the visible parts of the reference's HTML, in order. An
empty text leaves no part; one of blanks alone leaves an empty part, unless it breaks the line.
"""

import re
from collections.abc import Iterable

from paw.envs.webshop.catalogue import Catalogue
from paw.envs.webshop.reward import Goal, Product, reward

ACTION = re.compile(r"(.+)\[(.+)\]")
PER_PAGE = 10
BUTTONS = ("Back to Search", "< Prev", "Next >", "Buy Now")
BACK, PREVIOUS, NEXT, BUY = (text.lower() for text in BUTTONS)
SUB_PAGES = ("Description", "Features", "Reviews")


class Session:
    """A customer with a goal. The catalogue is only read: any number of sessions share it."""

    parts: list[str]  # visible texts of the page, without the instruction above it
    clickables: list[str]
    """Lower-cased texts that a click may name, in the reference's order; "search", though shown, does nothing."""
    hits: list[Product]  # found by the last search, best first
    page: int  # of the results, from 1
    product: Product | None  # the one looked at
    sub_page: bool  # whether a sub-page of the product is open
    options: dict[str, str]  # chosen for the product

    def __init__(self, catalogue: Catalogue, goal: Goal) -> None:
        self.catalogue, self.goal = catalogue, goal
        self.reward: float | None = None
        """In [0, 1], once something is bought: the session is over."""
        self._open()

    @property
    def searching(self) -> bool:
        return self.clickables == ["search"]

    @property
    def listed(self) -> list[Product]:
        return self.hits[(self.page - 1) * PER_PAGE : self.page * PER_PAGE]

    def available(self) -> list[str]:
        """The actions as the reference code lists them for the agent."""
        return [*(["search[<your query>]"] if self.searching else []), *(f"click[{text}]" for text in self.clickables)]

    def step(self, action: str) -> None:
        assert self.reward is None, "step() after the end"
        found = ACTION.match(action)
        if found is None:
            return
        name, argument = found[1], found[2].lower()
        if name == "search":
            self.hits = self.catalogue.search(argument)
            self._results(1)
        elif name == "click" and argument in self.clickables and argument != "search":
            self._click(argument)

    def _click(self, text: str) -> None:
        # The reference's order: an option that is called like a button does what the button does.
        product = self.product
        if text == BACK:
            self._open()
        elif product is None:
            if text in (NEXT, PREVIOUS):
                self._results(self.page + (1 if text == NEXT else -1))
            else:
                self._item(self.catalogue.by_asin[text])
        elif text == BUY:
            self.reward, self.clickables = reward(product, self.goal, self.options, self.catalogue.nouns), []
        elif text == PREVIOUS:
            if self.sub_page:
                self._item(product)
            else:
                self._results(self.page)
        elif text.capitalize() in SUB_PAGES:
            shown = {"description": _texts([product.description]), "features": [b.strip() for b in product.bullets]}
            self.sub_page, self.clickables = True, [BACK, PREVIOUS]
            self.parts = [*BUTTONS[:2], *shown.get(text, [])]  # the catalogue has no reviews
        else:  # of two options with that value the last one's counts
            name = [name for name, values in product.options.items() if text in values][-1]
            self.options[name] = text

    def _open(self) -> None:
        self.hits, self.page, self.product, self.sub_page, self.options = [], 1, None, False, {}
        self.parts, self.clickables = ["Search"], ["search"]

    def _results(self, page: int) -> None:
        self.page, self.product, self.sub_page, self.options = page, None, False, {}
        links = BUTTONS[1 if page > 1 else 2 : 3]
        items = [(product.asin, product.title, product.price_text) for product in self.listed]
        self.parts = [BUTTONS[0], f"Page {page} (Total results: {len(self.hits)})", *links]
        self.parts += [text for item in items for text in _texts(item)]
        self.clickables = [text.lower() for text in (BUTTONS[0], *links, *(asin for asin, *_ in items))]

    def _item(self, product: Product) -> None:
        """Which of its options are chosen does not show."""
        self.product, self.sub_page = product, False
        options = [text for name, values in product.options.items() for text in _texts([name, *values])]
        about = [*_texts([product.title]), f"Price: {product.price_text}".strip(), "Rating: N.A."]
        self.parts = [*BUTTONS[:2], *options, *about, *SUB_PAGES, BUTTONS[3]]
        values = [value for values in product.options.values() for value in values]
        buttons = [BACK, PREVIOUS, *(name.lower() for name in SUB_PAGES), BUY]
        self.clickables = list(dict.fromkeys([*buttons, *values]))


def _texts(texts: Iterable[str]) -> list[str]:
    """The parts that these texts leave, each the whole content of an HTML element."""
    return [text.strip() for text in texts if text.strip() or (text and "\n" not in text)]
