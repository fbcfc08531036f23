"""One visit to the shop: the pages, as text, and what each action does on them.

It follows web_agent_site/envs/web_agent_text_env.py of WebShop (`step`, `get_available_actions`,
`SimServer.receive`), but its search commands for debugging are ordinary words here. A page consists
of the visible parts of the reference's HTML, in order. An empty text leaves no part. A text of only
blanks leaves an empty part, unless it has a line break.
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
    """A customer with a goal. The catalogue is only read, so many sessions can share it."""

    parts: list[str]
    """Visible texts of the page, without the instruction at the top."""
    clickables: list[str]
    """Texts that a click may name, in lower case and the reference's order.

    They include "search", which does nothing.
    """
    hits: list[Product]
    """Products found by the last search, best first."""
    page: int
    """Number of the page of results, from 1."""
    product: Product | None
    """The product that is open."""
    sub_page: bool
    """Whether a sub-page of the product is open."""
    options: dict[str, str]
    """Name -> value of each option chosen for the product."""

    def __init__(self, catalogue: Catalogue, goal: Goal) -> None:
        self.catalogue = catalogue
        self.goal = goal
        self.reward: float | None = None
        """In [0, 1] once something is bought, which ends the session."""
        self._open()

    @property
    def searching(self) -> bool:
        return self.clickables == ["search"]

    @property
    def listed(self) -> list[Product]:
        return self.hits[(self.page - 1) * PER_PAGE : self.page * PER_PAGE]

    def available(self) -> list[str]:
        """Return the actions as the reference code lists them for the agent."""
        actions = [f"click[{text}]" for text in self.clickables]
        return ["search[<your query>]", *actions] if self.searching else actions

    def step(self, action: str) -> None:
        assert self.reward is None, "step() after the end"
        match = ACTION.match(action)
        if match is None:
            return
        name = match[1]
        argument = match[2].lower()
        if name == "search":
            self.hits = self.catalogue.search(argument)
            self._results(1)
        elif name == "click" and argument in self.clickables and argument != "search":
            self._click(argument)

    def _click(self, text: str) -> None:
        # This is the reference's order. An option named like a button does what the button does.
        product = self.product
        if text == BACK:
            self._open()
        elif product is None:
            if text == NEXT:
                self._results(self.page + 1)
            elif text == PREVIOUS:
                self._results(self.page - 1)
            else:
                self._item(self.catalogue.by_asin[text])
        elif text == BUY:
            self.reward = reward(product, self.goal, self.options, self.catalogue.nouns)
            self.clickables = []
        elif text == PREVIOUS:
            if self.sub_page:
                self._item(product)
            else:
                self._results(self.page)
        elif text.capitalize() in SUB_PAGES:
            self._open_sub_page(product, text)
        else:
            names = [name for name, values in product.options.items() if text in values]
            self.options[names[-1]] = text  # if two options have this value, the last one counts

    def _open(self) -> None:
        """Show the search page, with nothing found, opened or chosen."""
        self.hits = []
        self.page = 1
        self.product = None
        self.sub_page = False
        self.options = {}
        self.parts = ["Search"]
        self.clickables = ["search"]

    def _results(self, page: int) -> None:
        """Show a page of results.

        The links to the pages before and after have no upper bound, as in the reference.
        """
        self.page = page
        self.product = None
        self.sub_page = False
        self.options = {}
        back, previous, following, _ = BUTTONS
        links = [previous, following] if page > 1 else [following]
        self.parts = [back, f"Page {page} (Total results: {len(self.hits)})", *links]
        for product in self.listed:
            self.parts += _texts([product.asin, product.title, product.price_text])
        clickable = [back, *links, *(product.asin for product in self.listed)]
        self.clickables = [text.lower() for text in clickable]

    def _item(self, product: Product) -> None:
        """Show a product. The page does not show which options are chosen."""
        self.product = product
        self.sub_page = False
        back, previous, _, buy = BUTTONS
        self.parts = [back, previous]
        for name, values in product.options.items():
            self.parts += _texts([name, *values])
        self.parts += _texts([product.title])
        self.parts += [f"Price: {product.price_text}".strip(), "Rating: N.A.", *SUB_PAGES, buy]

        values = [value for values in product.options.values() for value in values]
        buttons = [BACK, PREVIOUS, *(name.lower() for name in SUB_PAGES), BUY]
        self.clickables = list(dict.fromkeys([*buttons, *values]))

    def _open_sub_page(self, product: Product, name: str) -> None:
        """Show a product's description, features or reviews. The catalogue has no reviews."""
        self.sub_page = True
        self.clickables = [BACK, PREVIOUS]
        self.parts = list(BUTTONS[:2])
        if name == "description":
            self.parts += _texts([product.description])
        elif name == "features":
            self.parts += [bullet.strip() for bullet in product.bullets]


def _texts(texts: Iterable[str]) -> list[str]:
    """Return the page parts of these texts, each the whole content of an HTML element."""
    return [text.strip() for text in texts if text.strip() or (text and "\n" not in text)]
