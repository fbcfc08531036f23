"""One visit to the shop: the state behind the pages, and what each action does to it.

Actions are `search[words]`, accepted on any page, and `click[text]`, whose lower-cased text must be clickable; anything
else does nothing. Source: web_agent_site/envs/web_agent_text_env.py of WebShop (`step`, `get_available_actions`,
`SimServer.receive`). Its search commands for debugging ("<r>", "<a>", ...) are ordinary words here.
"""

import re

from paw.envs.webshop import pages
from paw.envs.webshop.catalogue import Catalogue
from paw.envs.webshop.reward import reward
from paw.envs.webshop.types import Goal, Product

ACTION = re.compile(r"(.+)\[(.+)\]")
SUB_PAGES = {name.lower(): name for name in pages.SUB_PAGES}
BACK, PREVIOUS, NEXT, BUY = (text.lower() for text in (pages.BACK, pages.PREVIOUS, pages.NEXT, pages.BUY))


class Session:
    """A customer with a goal. The catalogue is only read: any number of sessions share it.

    `show_attributes` adds the sub-page that lists a product's attributes (the reference's `show_attrs`, off there too).
    """

    parts: list[str]
    """Visible texts of the page."""
    clickables: list[str]
    """Lower-cased texts that a click may name, in the reference's order; "search", though shown, does nothing."""
    hits: list[Product]
    """Found by the last search, best first."""
    page: int
    """Of the results, from 1."""
    product: Product | None
    """The one looked at."""
    sub_page: str | None
    """Lower-cased name of the product's sub-page that is open."""
    options: dict[str, str]
    """Chosen for `product`."""

    def __init__(self, catalogue: Catalogue, goal: Goal, *, show_attributes: bool = False) -> None:
        self.catalogue, self.goal = catalogue, goal
        self._buttons = pages.SUB_PAGES if show_attributes else pages.SUB_PAGES[:3]
        self.reward: float | None = None
        """In [0, 1], once something is bought: the session is over."""
        self._open()

    @property
    def text(self) -> str:
        return pages.SEPARATOR.join(self.parts)

    @property
    def searching(self) -> bool:
        """Whether the page has a search bar."""
        return self.clickables == ["search"]

    @property
    def listed(self) -> list[Product]:
        """The products of the current page of results."""
        return self.hits[(self.page - 1) * pages.PER_PAGE : self.page * pages.PER_PAGE]

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
            total = reward(product, self.goal, self.options, self.catalogue.nouns).total
            self.reward, self.clickables = total, []
            self.parts = pages.final_page(product, self.options, total)
        elif text == PREVIOUS:
            if self.sub_page:
                self._item(product)
            else:
                self._results(self.page)
        elif text in SUB_PAGES:
            self.sub_page, self.clickables = text, [BACK, PREVIOUS]
            self.parts = pages.sub_page(self.goal.instruction, product, SUB_PAGES[text])
        else:  # of two options with that value the last one's counts
            name = [name for name, values in product.options.items() if text in values][-1]
            self.options[name] = text

    def _open(self) -> None:
        self.hits, self.page, self.product, self.sub_page, self.options = [], 1, None, None, {}
        self.parts, self.clickables = pages.search_page(self.goal.instruction), ["search"]

    def _results(self, page: int) -> None:
        self.page, self.product, self.sub_page, self.options = page, None, None, {}
        self.parts = pages.results_page(self.goal.instruction, page, self.listed, len(self.hits))
        links = [PREVIOUS, NEXT] if page > 1 else [NEXT]
        self.clickables = [BACK, *links, *(product.asin.lower() for product in self.listed)]

    def _item(self, product: Product) -> None:
        self.product, self.sub_page = product, None
        self.parts = pages.item_page(self.goal.instruction, product, self._buttons)
        buttons = [BACK, PREVIOUS, *(name.lower() for name in self._buttons), BUY]
        values = [value for values in product.options.values() for value in values]
        self.clickables = list(dict.fromkeys([*buttons, *values]))
