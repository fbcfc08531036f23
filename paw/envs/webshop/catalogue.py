"""The shop's stock: products, the goals made from them and the search over them. One is shared by all sessions.

After WebShop's `load_products` (web_agent_site/engine/engine.py) and `get_goals` (goal.py there). Differences: prices
and limits are drawn from a generator seeded with 233, as its shuffle of goals is; null texts are empty.
"""

import functools
import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from sys import intern
from typing import Any

from pydantic import Field, field_validator

from paw.envs.checked import Strict, checked
from paw.envs.search.retrieval.bm25 import Bm25
from paw.envs.settings import WebshopConfig
from paw.envs.webshop import generator
from paw.envs.webshop.reward import Goal, Product, choose_nouns, need_rapidfuzz
from paw.errors import UserError

SEED = 233
HITS = 50
ITEMS, ENTRIES, HUMAN = generator.FILES
CHUNK, LARGEST = 1 << 20, 1 << 24
"""Characters read at a time, and of one product: a longer one is broken JSON."""
LIMITS = [10.0 * i for i in range(1, 100)]
"""Price limits, US dollars. A goal's is the larger of two drawn from the four next above its product's price."""


class Item(Strict):
    """What the shop shows of an element of the products file."""

    asin: str
    name: str
    category: str
    query: str
    product_category: str
    full_description: str | None
    small_description: list[str]
    pricing: list[float] = Field(default_factory=list, validate_default=True)
    customization_options: dict[str, tuple[str, ...]]

    @field_validator("small_description", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value or ""]

    @field_validator("pricing", mode="before")
    @classmethod
    def _prices(cls, value: Any) -> list[float]:
        """ "$12.99" or "$10.00 - $20.00"; without any, 100 dollars."""
        try:
            parts = value.split("$")[1:3] if value else ["100"]
            return [float(re.sub(r"[^\d.]", "", part)) for part in parts or [""]]
        except (AttributeError, ValueError):
            raise ValueError("should be like '$12.99'") from None

    @field_validator("customization_options", mode="before")
    @classmethod
    def _values(cls, value: Any) -> dict[str, tuple[str, ...]]:
        try:
            return {
                name.lower(): tuple(choice["value"].strip().replace("/", " | ").lower() for choice in choices)
                for name, choices in (value or {}).items()
                if choices is not None
            }
        except (AttributeError, KeyError, TypeError):
            raise ValueError("should be like {name: [{'value': text}, ...]}") from None


class Entry(Strict):
    """Of a product in the attributes file."""

    attributes: list[str] = []
    instruction: str | None = None
    instruction_attributes: list[str] | None = None


class Written(Strict):
    """By a person, for a product."""

    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str]


class Catalogue:
    """Read-only. UserError if bm25s or PyStemmer is missing."""

    def __init__(self, products: list[Product], goals: list[Goal], digest: str, nouns: str) -> None:
        self.products = products
        self.goals = goals
        """Shuffled: `n_test` to test with, then those to train on."""
        self.digest, self.nouns = digest, nouns
        """Hash of the files, or of what was generated. How nouns are found: "spacy" or "rules"."""
        self.by_asin = {product.asin.lower(): product for product in products}
        self._index = Bm25(map(_text, products))

    @property
    def n_test(self) -> int:
        """500 as in the reference, a quarter of fewer than 1,000."""
        return 500 if len(self.goals) >= 1000 else len(self.goals) // 4 or 1

    def search(self, query: str) -> list[Product]:
        """The 50 best products, best first; fewer where fewer share a word with the query."""
        return [self.products[at] for at, _ in self._index.top(query, HITS)]


def load(folder: Path, config: WebshopConfig) -> Catalogue:
    """The user's copy of WebShop's files, of the size that env.catalogue names. UserError: one is missing or broken."""
    need_rapidfuzz()
    names = [ITEMS, ENTRIES] if config.catalogue == "small" else ["items_shuffle.json", "items_ins_v2.json"]
    items, entries, *human = [folder / name for name in (*names, *([HUMAN] if config.goals == "human" else []))]
    for path in (items, entries, *human):
        if not path.is_file():
            raise UserError(
                f"{path} is missing (env.data with env.catalogue = '{config.catalogue}', env.goals = "
                f"'{config.goals}'); copy WebShop's data files there, or --env.data none plays a generated shop"
            )
    digest = hashlib.sha256()
    attributes = _read_object(entries, digest)
    written = _read_object(human[0], digest) if human else None
    return _stock(read_array(items, digest), attributes, written, config.nouns, digest, (str(items), str(entries)))


@functools.lru_cache(8)
def generated(products: int, goals: str, nouns: str, seed: int = 0) -> Catalogue:
    """The generated shop; one for all factories of a process."""
    need_rapidfuzz()
    made = generator.records(products, seed)
    digest = hashlib.sha256(json.dumps(made).encode())
    return _stock(made[0], made[1], made[2] if goals == "human" else None, nouns, digest, ("generated", "generated"))


def _stock(
    items: Iterable[Any], entries: dict[str, Any], written: Any, nouns: str, digest: Any, sources: tuple[str, str]
) -> Catalogue:
    """Of the three files' contents; `written` is None where goals are synthetic."""
    kind, rng = choose_nouns(nouns), random.Random(SEED)
    products, goals = list(_clean(items, entries, rng, *sources)), []
    for product in products:
        if written is not None:
            goals += _human_goals(product, written.get(product.asin, []), rng, f"{HUMAN}, {product.asin}")
        elif product.asin in entries:
            goals += _synthetic_goals(product, entries[product.asin], rng, f"{sources[1]}, {product.asin}")
        else:
            raise UserError(f"{sources[1]} has no '{product.asin}': it belongs to another products file")
    if len(goals) < 2:
        wanted = "synthetic" if written is None else "human"
        raise UserError(
            f"{sources[0]}: {len(products)} products make {len(goals)} goals with env.goals = '{wanted}'; "
            "at least 2 are needed, one of them to test with"
        )
    random.Random(SEED).shuffle(goals)
    return Catalogue(products, goals, digest.hexdigest(), kind)


def _clean(
    items: Iterable[Any], entries: dict[str, Any], rng: random.Random, source: str, entry_source: str
) -> Iterator[Product]:
    """Products as the shop shows them. Skips what the reference skips: no asin, a long one, one seen before."""
    seen = {"nan"}
    for number, raw in enumerate(items, 1):
        asin = str(raw.get("asin")) if isinstance(raw, dict) else ""
        if len(asin) > 10 or asin in seen:
            continue
        seen.add(asin)
        item = checked(Item, raw, f"{source}, product {number} ({asin})")
        entry = checked(Entry, entries.get(asin, {}), f"{entry_source}, {asin}")
        yield Product(
            asin=asin,
            title=item.name,
            category=intern(item.category),
            query=intern(item.query.lower().strip()),
            product_category=intern(item.product_category),
            description=item.full_description or "",
            bullets=tuple(item.small_description),
            attributes=tuple(entry.attributes),
            options=item.customization_options,
            price_text=" to ".join(f"${price}" for price in item.pricing),
            price=item.pricing[0] if len(item.pricing) == 1 else rng.uniform(*item.pricing),
        )


def _synthetic_goals(product: Product, raw: Any, rng: random.Random, where: str) -> Iterator[Goal]:
    """One for every combination of options of a product that has an instruction; they share a price limit."""
    entry = checked(Entry, raw, where)
    if entry.instruction is None:
        return
    if not entry.instruction_attributes:
        raise UserError(f"{where}: an instruction without 'instruction_attributes'")
    limit, ending = _limit(product, rng)
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        chosen = ", and ".join(f"{name}: {value}" for name, value in options.items())
        text = f"{entry.instruction}{' with ' if chosen else ''}{chosen}{ending}"
        yield Goal(product, text, tuple(entry.instruction_attributes), options, limit)


def _human_goals(product: Product, written: Any, rng: random.Random, where: str) -> Iterator[Goal]:
    """One for each instruction written for a product; those without attributes are skipped."""
    for number, raw in enumerate(checked(list[Any], written, where), 1):
        if isinstance(raw, dict) and raw.get("instruction_attributes") == []:
            continue
        entry = checked(Written, raw, f"{where}, instruction {number}")
        limit, ending = _limit(product, rng)
        options = {str(i): value for i, value in enumerate(entry.instruction_options)}
        yield Goal(product, entry.instruction.strip(".") + ending, tuple(entry.instruction_attributes), options, limit)


def _limit(product: Product, rng: random.Random) -> tuple[float, str]:
    above = [limit for limit in LIMITS if limit > product.price][:4]
    if len(above) < 2:
        return math.inf, ""
    limit = max(rng.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _text(product: Product) -> str:
    """What a search sees of a product."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.title, product.description, *product.bullets[:1], options]).lower()


# ---- reading


def read_array(path: Path, digest: Any) -> Iterator[Any]:
    """The elements of a JSON array, one at a time (the full products file has 5 GB); all bytes go to `digest`."""
    scan, text, at, number, gap = json.JSONDecoder().raw_decode, "", 0, 1, re.compile(r"\s*\[\s*")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while True:
                try:
                    if (found := gap.match(text, at)) is None:
                        raise json.JSONDecodeError("no array", text, at)
                    at, gap = found.end(), re.compile(r"[\s,]*")
                    if text[at : at + 1] == "]":
                        digest.update(file.read().encode())
                        return
                    value, at = scan(text, at)
                except json.JSONDecodeError as error:
                    chunk = file.read(CHUNK) if len(text) - at < LARGEST else ""
                    if not chunk:
                        problem = f"broken or cut short in product {number} ({error.msg})"
                        raise UserError(f"{path}: {problem}; download it again") from None
                    digest.update(chunk.encode())
                    text, at = text[at:] + chunk, 0
                else:
                    yield value
                    number += 1
    except UnicodeDecodeError:
        raise UserError(f"{path}: no UTF-8; download it again") from None


def _read_object(path: Path, digest: Any) -> dict[str, Any]:
    data = path.read_bytes()
    digest.update(data)
    try:
        return checked(dict[str, Any], json.loads(data), str(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: broken or cut short ({error.msg}); download it again") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: no UTF-8; download it again") from None
