"""Generates a shop from a seed, in the schema of WebShop's three files. shop.toml has the goods.

Products come in families with almost the same title. Each variant lacks one thing that a buyer of
the first product may want, so search results must be read. A goal's own product always fits it.
"""

import json
import random
import string
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

SHOP: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("shop.toml").read_text(encoding="utf-8")
)
OPTIONS = {key: (name, values.split(", ")) for key, (name, values) in SHOP["options"].items()}
FILES = ("items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json")
DEARER = (50.0, 90.0)
"""Range of a variant's surcharge, which exceeds any price limit of its family's first product."""


class Ware(NamedTuple):
    category: str
    query: str
    path: str
    nouns: list[str]
    uses: list[str]
    adjectives: list[str]
    features: list[str]
    options: list[str]
    prices: list[str]

    @classmethod
    def parse(cls, line: str) -> "Ware":
        category, query, path, *lists, prices = line.split(" | ")
        nouns, uses, adjectives, features, options = (cell.split(", ") for cell in lists)
        return cls(
            category, query, path, nouns, uses, adjectives, features, options, prices.split()
        )


WARES = [Ware.parse(line) for line in SHOP["wares"].splitlines()]


def records(products: int, seed: int = 0) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return the contents of items_shuffle.json, items_ins_v2.json and items_human_ins.json.

    They depend only on the arguments.
    """
    rng = random.Random(f"webshop/{seed}")
    items: list[dict[str, Any]] = []
    entries: dict[str, Any] = {}
    human: dict[str, Any] = {}
    while len(items) < products:
        family = _family(rng, WARES[len(items) % len(WARES)])
        for product in family[: products - len(items)]:
            asin = _asin(rng, entries)
            items.append({"asin": asin, **product["item"]})
            entries[asin] = product["entry"]
            if rng.random() < 0.6:
                human[asin] = [{"asin": asin, **_human(rng, product)}]
    rng.shuffle(items)
    return items, entries, human


def _asin(rng: random.Random, used: Collection[str]) -> str:
    """Draw a product number that is not in use."""
    while True:
        asin = "B0" + "".join(rng.choices(string.ascii_uppercase + string.digits, k=8))
        if asin not in used:
            return asin


def write(folder: Path, products: int = 3000, seed: int = 0) -> None:
    """Write the three files under the names of the small ones, for reading or other programs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(FILES, records(products, seed), strict=True):
        (folder / name).write_text(
            json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8"
        )


def _family(rng: random.Random, ware: Ware) -> list[dict[str, Any]]:
    """Draw a product and up to three variants, each of which lacks one thing.

    The order of the draws determines what is sold.
    """
    syllables = SHOP["syllables"].split()
    brand = rng.choice(syllables) + rng.choice(syllables) + rng.choice(SHOP["ends"].split())
    words = {
        "brand": brand.capitalize(),
        "line": rng.choice(SHOP["lines"].split()),
        "noun": rng.choice(ware.nouns),
        "use": rng.choice(ware.uses),
    }
    adjectives = rng.sample(ware.adjectives, 2)
    features = rng.sample(ware.features, 2)
    has_options = rng.random() >= 0.15
    options = {key: _values(rng, key) for key in ware.options} if has_options else {}
    price = round(rng.uniform(*map(float, ware.prices)), 2)
    family = [_product(rng, ware, words, adjectives, features, options, price)]
    for missing in rng.sample(("adjective", "feature", "option", "price"), rng.randrange(4)):
        variant = {
            "adjectives": adjectives,
            "features": features,
            "options": options,
            "price": price,
        }
        if missing == "adjective":
            others = [adjective for adjective in ware.adjectives if adjective not in adjectives]
            variant["adjectives"] = [adjectives[0], rng.choice(others)]
        elif missing == "feature":
            others = [feature for feature in ware.features if feature not in features]
            variant["features"] = [rng.choice(others), features[1]]
        elif missing == "option" and options:
            key = rng.choice(sorted(options))
            variant["options"] = {**options, key: _values(rng, key, without=options[key])}
        else:
            variant["price"] = round(price + rng.uniform(*DEARER), 2)
        family.append(_product(rng, ware, words, **variant))
    return family


def _values(rng: random.Random, key: str, without: list[str] | None = None) -> list[str]:
    """Draw two to four values of an option, in the order of shop.toml."""
    _, all_values = OPTIONS[key]
    values = [value for value in all_values if value not in (without or ())]
    count = min(len(values), rng.randint(2, 4))
    chosen = sorted(rng.sample(range(len(values)), count))
    return [values[i] for i in chosen]


def _product(
    rng: random.Random,
    ware: Ware,
    words: dict[str, str],
    adjectives: list[str],
    features: list[str],
    options: dict[str, list[str]],
    price: float,
) -> dict[str, Any]:
    """Make the records of a product: `item` and `entry` for the files, the others for `_human`."""
    attributes = [*adjectives, *features]
    shown = rng.choice(attributes)
    title = rng.choice(SHOP["titles"]).format(shown=shown, **words)
    hidden = rng.sample(attributes, len(attributes))
    bullets = []
    for attribute in hidden:
        template = rng.choice(SHOP["bullets"])
        bullets.append(template.format(a=attribute.capitalize(), **words))
    spread = round(price + rng.uniform(2.0, 9.0), 2)
    has_one_price = not options or rng.random() < 0.5
    prices = f"${price:.2f}" if has_one_price else f"${price:.2f}${spread:.2f}"
    item = {
        "name": title.title().replace("'S", "'s"),
        "category": ware.category,
        "query": ware.query,
        "product_category": f"{SHOP['roots'][ware.category]} › {ware.path}",
        "brand": words["brand"],
        "full_description": rng.choice(SHOP["descriptions"]).format(**words),
        "small_description": [*bullets, rng.choice(SHOP["extras"]).format(**words)],
        "pricing": prices,
        "images": [""],
        "customization_options": _customization(rng, options, price, spread),
    }
    wanted_adjectives = [adjectives[1]] if rng.random() < 0.7 else adjectives
    entry = {
        "attributes": attributes,
        "instruction": (
            f"Find me {', '.join(wanted_adjectives)} {ware.query} for {words['use']} "
            f"with {features[0]}"
        ),
        "instruction_attributes": [*wanted_adjectives, features[0]],
    }
    return {
        "item": item,
        "entry": entry,
        "words": words,
        "options": {OPTIONS[key][0]: values for key, values in options.items()},
        "adjectives": wanted_adjectives,
        "feature": features[0],
    }


def _customization(
    rng: random.Random, options: dict[str, list[str]], price: float, highest_price: float
) -> dict[str, list[dict[str, Any]]]:
    """Return the values of each option, by name.

    The first value costs `price`, the others up to `highest_price`.
    """
    customization = {}
    for key, values in options.items():
        choices = []
        for i, value in enumerate(values):
            value_price = price if i == 0 else rng.uniform(price, highest_price)
            choices.append({"value": value, "price": round(value_price, 2), "image": None})
        customization[OPTIONS[key][0].title()] = choices
    return customization


def _human(rng: random.Random, product: dict[str, Any]) -> dict[str, Any]:
    """Make an instruction that a person might have written for a product, with its meaning."""
    adjectives = product["adjectives"]
    options = {}
    for name, values in product["options"].items():
        if rng.random() < 0.8:
            options[name] = rng.choice(values)
    opening = rng.choice(SHOP["openings"])
    request = rng.choice(SHOP["requests"]).format(
        article=_article(adjectives[0], noun=product["words"]["noun"]),
        joined=" and ".join(adjectives),
        listed=", ".join(adjectives),
        feature=product["feature"],
        **product["words"],
    )
    wishes = ""
    for name, value in options.items():
        phrases = SHOP["wishes"].get(name, [f"with {name} {{}}"])
        wishes += " " + rng.choice(phrases).format(value)
    return {
        "instruction": opening + request + wishes + rng.choice((".", "")),
        "instruction_attributes": [*adjectives, product["feature"]],
        "instruction_options": list(options.values()),
    }


def _article(adjective: str, *, noun: str) -> str:
    """Return what precedes the adjective and the noun: "a ", "an ", or "" before a plural."""
    if noun.endswith("s"):
        return ""
    return "an " if adjective[0] in "aeiou" else "a "
