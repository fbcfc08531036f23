"""The reward of buying a product, as in the reference's `get_reward`
(web_agent_site/engine/goal.py).

    r = r_type * (attributes matched + options matched + [price <= limit]) / (|attributes| +
    |options| + 1)

Two texts match if their token set ratio, rounded, is above 85. A chosen option is compared as its
base colour. So is a wanted option if a person wrote the goal. A synthetic goal's wanted option is
compared as name and value together, such as "size large", unless the value is exactly a base
colour. The reference passes the pair, and scores must be comparable. So a value such as "standard",
which counts as "tan" once chosen, meets no synthetic goal in either code.

There is one difference. Nouns come from spaCy's tagger, as in the reference, only if its model is
installed. Titles are capitalised, so the tagger takes most adjectives for names, and it excludes
numbers and function words. The filter that is used without spaCy excludes the same words.
"""

import functools
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from paw.errors import UserError, needed

MATCH = 85
PATH = "›"
_COLOURS = """
    ash black charcoal granite graphite gray grey pewter silver slate steel stone asphalt
    alabaster champagne cream crystal ivory mushroom natural nude seashell white
    beige bronze brown camel caramel chestnut chocolate coffee cognac copper espresso khaki mocha
    rust sand tan taupe walnut wheat
    bordeaux burgundy cranberry maroon merlot red wine
    apricot blush coral fuchsia magenta mauve peach pink rose
    banana gold lemon mustard orange sunflower yellow
    grass green ivy lime mint olive
    aqua azure blue denim indigo midnight navy royal sapphire stonewash teal turquoise
    eggplant grape lavender lilac plum purple violet
    camo cheetah christmas dark elephant heather leopard light multicolor rainbow skull tiger
"""
COLOURS = sorted(_COLOURS.split())
"""Base colours and patterns. They are the words in the reference's normalize.py, so scores are
comparable."""
MODEL = "en_core_web_sm"
WORD = re.compile(r"\b\d*[^\W\d_]\w*")
"""A word, with or without digits: "cord", "2pcs", "ht830v"."""
_FUNCTION = """
    a an the and or nor but of for with without in on at by to from as up out over under into onto
    per than via no not all any every each both this that these those your our their its his her my
    you it we they i is are be was can will has have s only very more most so
"""
FUNCTION = frozenset(_FUNCTION.split())


@dataclass(frozen=True, slots=True)
class Product:
    asin: str
    title: str
    category: str
    query: str
    product_category: str
    """Path, such as "Clothing › Men › Shirts"."""
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    """Lower-cased name -> lower-cased values, in the file's order."""
    price_text: str
    """As shown: "$12.0" or "$12.0 to $20.0"."""
    price: float
    """Drawn within the pricing. A goal's limit is compared with it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a session must buy."""

    product: Product
    """The product from which the goal was made. Any other product that fits is as good."""
    instruction: str
    """Text as the session shows it, with the price limit if there is one."""
    attributes: tuple[str, ...]
    options: dict[str, str]
    """Option name -> wanted value.

    Human goals have only values, so the names are "0", "1", ...
    """
    price_upper: float
    """Largest price, US dollars; infinite without a limit."""


def need_rapidfuzz() -> Any:
    """Import the library that compares texts. Raises UserError if it is not installed."""
    return needed("rapidfuzz", "WebShop's reward", "webshop")


def reward(product: Product, goal: Goal, options: dict[str, str], nouns: str) -> float:
    """Return r in [0, 1] for buying `product` with the chosen `options` (name -> value).

    `nouns` says how nouns are found ("spacy" or "rules").
    """
    attributes_met = sum(_has(product, attribute) for attribute in goal.attributes)
    affordable = product.price <= goal.price_upper
    matched = attributes_met + options_met(goal, options) + affordable
    wanted = len(goal.attributes) + len(goal.options) + 1
    return type_reward(product, goal, nouns) * matched / wanted


def options_met(goal: Goal, options: dict[str, str]) -> int:
    """Count how many of the goal's options the chosen ones match."""
    chosen = [base_colour(value) for value in options.values()]
    wanted = [_wanted(name, value) for name, value in goal.options.items()]
    return sum(any(_match(value, text) for value in chosen) for text in wanted)


def type_reward(product: Product, goal: Goal, nouns: str) -> float:
    """Return r_type: whether query, category path and title nouns show the right kind."""
    wanted_nouns = title_nouns(goal.product.title, nouns)
    title_score = 0.2
    if wanted_nouns:
        shared_nouns = set(wanted_nouns) & set(title_nouns(product.title, nouns))
        # As in the reference, repeated nouns count only in the denominator.
        title_score = len(shared_nouns) / len(wanted_nouns)
    if title_score == 0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    same_query = product.query == goal.product.query
    shared_categories = _categories(product) & _categories(goal.product)
    if same_query or len(shared_categories) >= 2 or title_score > 0.2:
        return 1.0
    return 0.5


def _categories(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split(PATH)}


def base_colour(text: str) -> str:
    """Return the alphabetically first base colour that `text` contains anywhere, else `text`."""
    return next((colour for colour in COLOURS if colour in text), text)


def _has(product: Product, attribute: str) -> bool:
    if any(_match(text, attribute) for text in product.attributes):
        return True
    texts = (product.title, " ".join(product.bullets), product.description)
    return any(attribute in text.lower() for text in texts)


def _wanted(name: str, value: str) -> str:
    """Return the text that a chosen option must match."""
    if name.isdigit():  # a human goal
        return base_colour(value)
    return value if value in COLOURS else f"{name} {value}"


@functools.lru_cache(1 << 16)
def _match(a: str, b: str) -> bool:
    library = need_rapidfuzz()
    ratio = library.fuzz.token_set_ratio(
        a.translate(LATIN_1), b.translate(LATIN_1), processor=library.utils.default_process
    )
    return round(ratio) > MATCH


LATIN_1 = dict.fromkeys(range(128, 256))
"""Characters that thefuzz, the reference's library, drops."""


def choose_nouns(wanted: str) -> str:
    """Return "spacy" or "rules" for env.nouns.

    Raises UserError if spaCy's model is wanted and not installed.
    """
    installed = all(importlib.util.find_spec(name) for name in ("spacy", MODEL))
    if wanted == "spacy" and not installed:
        raise UserError(
            f"env.nouns = 'spacy' needs spaCy and {MODEL}: pip install spacy, "
            f"then python -m spacy download {MODEL}"
        )
    if wanted == "rules" or not installed:
        return "rules"
    return "spacy"


@functools.lru_cache(1 << 16)
def title_nouns(title: str, kind: str) -> tuple[str, ...]:
    """Return a title's nouns in lower case, in order, with repeats, by "spacy" or "rules"."""
    if kind == "spacy":
        return tuple(
            word.text.lower() for word in _spacy()(title) if word.pos_ in ("NOUN", "PROPN")
        )
    return tuple(word for word in WORD.findall(title.lower()) if word not in FUNCTION)


@functools.cache
def _spacy():
    import spacy

    return spacy.load(MODEL, disable=["parser", "ner", "lemmatizer"])
