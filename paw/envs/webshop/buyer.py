"""A rule-based buyer, which knows the product that a goal was made from: it gets there by legal actions alone.

It searches, pages to that product, opens it, chooses the wanted options and buys. Another product that earns as much is
bought as well, where the buyer finds it open.
"""

from collections.abc import Sequence

from paw.envs.webshop.pages import PER_PAGE
from paw.envs.webshop.reward import reward
from paw.envs.webshop.session import BACK, BUY, NEXT, PREVIOUS, Session
from paw.envs.webshop.types import Goal, Product

LOST = 1_000
"""Page of a product that a search does not find."""


def next_action(session: Session, queries: Sequence[str]) -> str:
    """What the buyer does now; of `queries` it searches for the first that finds the product on the earliest page."""
    goal, product = session.goal, session.product
    if session.searching:
        pages = [_page_of(goal.asin, session.catalogue.search(query)) for query in queries]
        return f"search[{queries[pages.index(min(pages))]}]"
    if product is None:
        page = _page_of(goal.asin, session.hits)
        if page == session.page:
            return f"click[{goal.asin.lower()}]"
        return f"click[{BACK if page == LOST else NEXT if page > session.page else PREVIOUS}]"
    nouns = session.catalogue.nouns
    wanted = wanted_options(product, goal, nouns)
    if session.sub_page or (product.asin != goal.asin and reward(product, goal, wanted, nouns).total < 1):
        return f"click[{PREVIOUS}]"
    missing = [value for value in wanted.values() if value not in session.options.values()]
    return f"click[{missing[0] if missing else BUY}]"


def wanted_options(product: Product, goal: Goal, nouns: str) -> dict[str, str]:
    """The options of `product` that meet those of `goal`, as far as it has them."""
    values = set(goal.options.values())
    same = {name: value for name, offered in product.options.items() for value in offered if value in values}
    if values <= set(same.values()):
        return same
    chosen: dict[str, str] = {}  # what people wrote may be near to a value only
    for name, offered in product.options.items():
        met = {value: reward(product, goal, {**chosen, name: value}, nouns).options for value in offered}
        best = max(offered, key=lambda value: met[value], default="")
        if best and met[best] > (reward(product, goal, chosen, nouns).options if goal.options else 1):
            chosen[name] = best
    return chosen


def _page_of(asin: str, hits: Sequence[Product]) -> int:
    return next((i // PER_PAGE + 1 for i, product in enumerate(hits) if product.asin == asin), LOST)
