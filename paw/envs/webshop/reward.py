"""What buying a product earns, as the reference's `get_reward` (web_agent_site/engine/goal.py) has it.

    r = r_type * (attributes matched + options matched + [price <= limit]) / (|attributes| + |options| + 1)

Two texts match if their token set ratio, rounded, is above 85. Of options, what was chosen counts as its base colour;
what was wanted too where people wrote the goal. A synthetic goal's wanted option counts as its name and value together,
such as "size large", unless the value is a base colour exactly: the reference hands over the pair, and scores have to
compare. Hence a value such as "standard", which counts as "tan" once chosen, meets no synthetic goal there or here.

Difference: nouns come from spaCy's model only where that is installed (see `nouns`).
"""

import functools
import importlib.util
from dataclasses import dataclass

from paw.envs.webshop.nouns import nouns as title_nouns
from paw.envs.webshop.types import Goal, Product
from paw.errors import UserError

MATCH = 85
PATH = "›"
_COLOURS = """
    ash black charcoal granite graphite gray grey pewter silver slate steel stone asphalt
    alabaster champagne cream crystal ivory mushroom natural nude seashell white
    beige bronze brown camel caramel chestnut chocolate coffee cognac copper espresso khaki mocha rust sand tan taupe
    walnut wheat
    bordeaux burgundy cranberry maroon merlot red wine
    apricot blush coral fuchsia magenta mauve peach pink rose
    banana gold lemon mustard orange sunflower yellow
    grass green ivy lime mint olive
    aqua azure blue denim indigo midnight navy royal sapphire stonewash teal turquoise
    eggplant grape lavender lilac plum purple violet
    camo cheetah christmas dark elephant heather leopard light multicolor rainbow skull tiger
"""
COLOURS = sorted(_COLOURS.split())
"""Base colours and patterns: the words that the reference's normalize.py knows, or scores would not compare."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One purchase. 1.0 in all parts is success."""

    total: float
    """r, in [0, 1]."""
    type: float
    """r_type: 1, 0.5, 0.1 or 0."""
    attributes: float
    """Share of the goal's attributes matched."""
    options: float
    """Share of the goal's options matched; 1 where it has none."""
    price: bool
    """Whether the price is within the limit."""


def require_rapidfuzz() -> None:
    """UserError if the reward could not be computed."""
    if importlib.util.find_spec("rapidfuzz") is None:
        raise UserError("WebShop's reward needs rapidfuzz: pip install 'paw-trainer[webshop]'")


def reward(product: Product, goal: Goal, options: dict[str, str], nouns: str) -> Reward:
    """The reward of buying `product` with the chosen `options` (name -> value) for `goal`.

    Args:
        nouns: "spacy" or "rules", the catalogue's `nouns`.
    """
    attributes = sum(_has(product, attribute) for attribute in goal.attributes)
    chosen = [base_colour(value) for value in options.values()]
    wanted = [_wanted(*option) for option in goal.options.items()]
    met = sum(any(_match(value, option) for value in chosen) for option in wanted)
    price = product.price <= goal.price_upper
    kind = type_reward(product, goal, nouns)
    return Reward(
        total=kind * (attributes + met + price) / (len(goal.attributes) + len(goal.options) + 1),
        type=kind,
        attributes=attributes / len(goal.attributes),
        options=met / len(goal.options) if goal.options else 1.0,
        price=price,
    )


def type_reward(product: Product, goal: Goal, nouns: str) -> float:
    """r_type: whether `product` is of the kind wanted, by query, category path and nouns of the title."""
    wanted = title_nouns(goal.name, nouns)
    # Repeated nouns count in the denominator only, as in the reference.
    score = len(set(wanted) & set(title_nouns(product.title, nouns))) / len(wanted) if wanted else 0.2
    if score < 0.1:
        return 0.1 if score else 0.0
    same = product.query == goal.query or len(_path(product.product_category) & _path(goal.product_category)) >= 2
    return 1.0 if same or score > 0.2 else 0.5


def base_colour(text: str) -> str:
    """The first base colour in alphabetical order that `text` contains, anywhere; `text` itself without one."""
    return next((colour for colour in COLOURS if colour in text), text)


def _has(product: Product, attribute: str) -> bool:
    if any(_match(own, attribute) for own in product.attributes):
        return True
    texts = (product.title, " ".join(product.bullets), product.description)
    return any(attribute in text.lower() for text in texts)


def _wanted(name: str, value: str) -> str:
    if name.isdigit():  # a human goal's
        return base_colour(value)
    return value if value in COLOURS else f"{name} {value}"


def _path(category: str) -> set[str]:
    return {part.strip() for part in category.split(PATH)}


@functools.lru_cache(1 << 16)
def _match(a: str, b: str) -> bool:
    from rapidfuzz import fuzz, utils

    a, b = (text.translate(LATIN_1) for text in (a, b))
    return round(fuzz.token_set_ratio(a, b, processor=utils.default_process)) > MATCH


LATIN_1 = dict.fromkeys(range(128, 256))
"""Characters that thefuzz drops."""
