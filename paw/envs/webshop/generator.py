"""A shop made from a seed, in the schema of WebShop's three files.

Products come in families: the first, and variants that miss one thing a buyer of the first may want (an attribute, the
colours or sizes, the price), under nearly the same title. What a product has stands partly in its title, partly in its
features: search results need reading. A goal's own product always fits it.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

from paw.envs.webshop.wares import OPTIONS, ROOTS, WARES, Ware

_SYLLABLES = "al bel cor dan el fen gar hol ira jun kel lum mar nor ova pel quin ros sol tam ur vel wes xan yor zel"
_ENDS = "a ex ia ico in ium o on ora us"
_LINES = "Aero Bloom Classic Daily Essential Harbor Luxe Meadow Nova Origin Prime Summit Terra Urban Vista"
SYLLABLES, ENDS, LINES = _SYLLABLES.split(), _ENDS.split(), _LINES.split()
CODES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
DEARER = (50.0, 90.0)
"""A variant's surcharge: above every price limit that its family's first can draw."""
BULLETS = (
    "{a}: our {noun} is made for {use}, and every batch is checked before it leaves the workshop.",
    "{a} - we thought about {use} first, so that you can enjoy this {noun} every day.",
    "Designed for {use}: {a}, because details matter.",
    "You asked, we listened: {a}. A {noun} that keeps its promise.",
)
EXTRAS = (
    "Satisfaction guaranteed: write to {brand} within 30 days and we will make it right.",
    "A thoughtful gift for birthdays, holidays and housewarmings.",
    "Please check the available choices before you order; colors may vary with your screen.",
)
DESCRIPTIONS = (
    "{brand} started as a family business. The {line} {noun} is our answer to what people told us about {use}.",
    "Meet the {line} {noun} by {brand}. It was developed together with people who know all about {use}.",
    "Looking for something for {use}? The {noun} of our {line} series does its work without a fuss.",
)
OPENINGS = ("i am looking for", "i need", "i want", "find me", "i would like", "can you find me", "i'm searching for")
WISHES = {
    "color": ("in {}", "in the color {}", "that comes in {}"),
    "size": ("in size {}", "in a size {}", "and the size should be {}"),
    "scent": ("that smells of {}", "with {} scent"),
    "flavor name": ("in {} flavor", "and i prefer the {} one"),
}


def records(
    products: int, seed: int = 0
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """The contents of items_shuffle.json, items_ins_v2.json and items_human_ins.json; a function of the arguments."""
    rng = random.Random(f"webshop/{seed}")
    items: list[dict[str, Any]] = []
    entries: dict[str, dict[str, Any]] = {}
    human: dict[str, list[dict[str, Any]]] = {}
    while len(items) < products:
        for made in _family(rng, WARES[len(items) % len(WARES)])[: products - len(items)]:
            while (asin := "B0" + "".join(rng.choices(CODES, k=8))) in entries:
                pass
            items.append({"asin": asin, **made["item"]})
            entries[asin] = made["entry"]
            if rng.random() < 0.6:
                human[asin] = [{"asin": asin, **_human(rng, made)}]
    rng.shuffle(items)
    return items, entries, human


def write(folder: Path, products: int = 3000, seed: int = 0) -> None:
    """The three files, named as the small ones, for a look or for another program."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json")
    for name, content in zip(names, records(products, seed), strict=True):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def _family(rng: random.Random, ware: Ware) -> list[dict[str, Any]]:
    brand = (rng.choice(SYLLABLES) + rng.choice(SYLLABLES) + rng.choice(ENDS)).capitalize()
    line, noun, use = rng.choice(LINES), rng.choice(ware.nouns), rng.choice(ware.uses)
    adjectives, features = rng.sample(ware.adjectives, 2), rng.sample(ware.features, 2)
    options = {} if rng.random() < 0.15 else {key: _values(rng, key) for key in ware.options}
    price = round(rng.uniform(*ware.prices), 2)
    make = functools.partial(_product, rng, ware, brand, line, noun, use)
    family = [make(adjectives, features, options, price)]
    for miss in rng.sample(("adjective", "feature", "option", "price"), rng.randrange(4)):
        if miss == "adjective":
            other = rng.choice([a for a in ware.adjectives if a not in adjectives])
            family.append(make([adjectives[0], other], features, options, price))
        elif miss == "feature":
            other = rng.choice([f for f in ware.features if f not in features])
            family.append(make(adjectives, [other, features[1]], options, price))
        elif miss == "option" and options:
            key = rng.choice(sorted(options))
            family.append(make(adjectives, features, {**options, key: _values(rng, key, options[key])}, price))
        else:
            family.append(make(adjectives, features, options, round(price + rng.uniform(*DEARER), 2)))
    return family


def _values(rng: random.Random, key: str, without: list[str] | None = None) -> list[str]:
    values = [value for value in OPTIONS[key][1].split(", ") if value not in (without or ())]
    kept = sorted(rng.sample(range(len(values)), min(len(values), rng.randint(2, 4))))
    return [values[i] for i in kept]


def _product(
    rng: random.Random,
    ware: Ware,
    brand: str,
    line: str,
    noun: str,
    use: str,
    adjectives: list[str],
    features: list[str],
    options: dict[str, list[str]],
    price: float,
) -> dict[str, Any]:
    attributes = [*adjectives, *features]
    shown = rng.choice(attributes)
    words = {"brand": brand, "line": line, "noun": noun, "use": use}
    title = rng.choice(
        (
            f"{brand} {line} {shown} {noun} for {use}",
            f"{brand} {noun}, {shown}, {line} series for {use}",
            f"{shown} {noun} by {brand}, {line} collection, {use}",
        )
    )
    hidden = rng.sample(attributes, len(attributes))
    bullets = [rng.choice(BULLETS).format(a=a.capitalize(), **words) for a in hidden]
    spread = round(price + rng.uniform(2.0, 9.0), 2)
    prices = f"${price:.2f}" if not options or rng.random() < 0.5 else f"${price:.2f}${spread:.2f}"
    item = {
        "name": title.title().replace("'S", "'s"),
        "category": ware.category,
        "query": ware.query,
        "product_category": f"{ROOTS[ware.category]} › {ware.path}",
        "brand": brand,
        "full_description": rng.choice(DESCRIPTIONS).format(**words),
        "small_description": [*bullets, rng.choice(EXTRAS).format(**words)],
        "pricing": prices,
        "images": [""],
        "customization_options": {
            OPTIONS[key][0].title(): [
                {"value": value, "price": round(price if i == 0 else rng.uniform(price, spread), 2), "image": None}
                for i, value in enumerate(values)
            ]
            for key, values in options.items()
        },
    }
    wanted = ([adjectives[1]], [features[0]]) if rng.random() < 0.7 else (adjectives, [features[0]])
    entry = {
        "attributes": attributes,
        "instruction": f"Find me {', '.join(wanted[0])} {ware.query} for {use} with {wanted[1][0]}",
        "instruction_attributes": [*wanted[0], *wanted[1]],
    }
    named = {OPTIONS[key][0]: values for key, values in options.items()}
    return {"item": item, "entry": entry, "noun": noun, "use": use, "options": named, "wanted": wanted}


def _human(rng: random.Random, made: dict[str, Any]) -> dict[str, Any]:
    """What a person might have written for a product, and what was meant."""
    before, after = made["wanted"]
    options = {name: rng.choice(values) for name, values in made["options"].items() if rng.random() < 0.8}
    article = "" if made["noun"].endswith("s") else "an " if before[0][0] in "aeiou" else "a "
    noun, use = made["noun"], made["use"]
    text = rng.choice(OPENINGS) + rng.choice(
        (
            f" {article}{' and '.join(before)} {noun} with {after[0]}",
            f" {noun} for {use} that has {after[0]} and is {', '.join(before)}",
            f" {article}{', '.join(before)} {noun} for {use}. it should have {after[0]}",
        )
    )
    for name, value in options.items():
        text += " " + rng.choice(WISHES.get(name, (f"with {name} {{}}",))).format(value)
    return {
        "instruction": text + rng.choice((".", "")),
        "instruction_attributes": [*before, *after],
        "instruction_options": list(options.values()),
    }
