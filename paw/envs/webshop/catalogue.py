"""The shop's stock, shared by all sessions: products, the goals made from them, and the search.

It follows WebShop's `load_products` (web_agent_site/engine/engine.py) and `get_goals` (goal.py
there), with two differences. Prices and limits are drawn from a generator with seed 233, which the
reference uses only to shuffle the goals. Texts that are null there are empty here.
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
CHUNK = 1 << 20
"""Number of characters read at a time."""
LARGEST = 1 << 24
"""Maximum number of characters of a product. If one has more, the JSON is broken."""
LIMITS = [10.0 * i for i in range(1, 100)]
"""Price limits, US dollars.

A goal's limit is the larger of two limits drawn from the next four above its product's price.
"""


class Item(Strict):
    """The parts of an element of the products file that the shop uses."""

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
        """Parse "$12.99" or "$10.00 - $20.00". A product without prices costs 100 dollars."""
        if not value:
            return [100.0]
        try:
            parts = value.split("$")[1:3] or [""]
            return [float(re.sub(r"[^\d.]", "", part)) for part in parts]
        except (AttributeError, ValueError):
            raise ValueError("should be like '$12.99'") from None

    @field_validator("customization_options", mode="before")
    @classmethod
    def _values(cls, value: Any) -> dict[str, tuple[str, ...]]:
        options = {}
        try:
            for name, choices in (value or {}).items():
                if choices is None:
                    continue
                texts = [choice["value"].strip().replace("/", " | ") for choice in choices]
                options[name.lower()] = tuple(text.lower() for text in texts)
            return options
        except (AttributeError, KeyError, TypeError):
            raise ValueError("should be like {name: [{'value': text}, ...]}") from None


class Entry(Strict):
    """A product's record in the attributes file."""

    attributes: list[str] = []
    instruction: str | None = None
    instruction_attributes: list[str] | None = None


class HumanInstruction(Strict):
    """An instruction that a person wrote for a product."""

    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str]


class Catalogue:
    """Products, goals and search, read-only. Raises UserError if bm25s or PyStemmer is missing."""

    def __init__(self, products: list[Product], goals: list[Goal], digest: str, nouns: str) -> None:
        self.products = products
        self.goals = goals
        """Shuffled. The first `n_test` are for evaluation, the others for training."""
        self.digest = digest
        """Hash of the files, or of the generated data."""
        self.nouns = nouns
        """How nouns of titles are found: "spacy" or "rules"."""
        self.by_asin = {product.asin.lower(): product for product in products}
        self._index = Bm25(map(_text, products))

    @property
    def n_test(self) -> int:
        """Number of goals for evaluation: 500 as in the reference, or a quarter of few goals."""
        if len(self.goals) >= 1000:
            return 500
        return len(self.goals) // 4 or 1

    def search(self, query: str) -> list[Product]:
        """Return the 50 best products, best first; fewer if fewer share a word with the query."""
        return [self.products[i] for i, _ in self._index.top(query, HITS)]


def load(folder: Path, config: WebshopConfig) -> Catalogue:
    """Load the user's copy of WebShop's files, in the size that env.catalogue names.

    Raises UserError if a file is missing or broken.
    """
    need_rapidfuzz()
    items = folder / "items_shuffle.json"
    entries = folder / "items_ins_v2.json"
    if config.catalogue == "small":
        items = folder / ITEMS
        entries = folder / ENTRIES
    human = folder / HUMAN if config.goals == "human" else None
    for path in (items, entries, human):
        if path and not path.is_file():
            raise UserError(
                f"{path} is missing (env.data with env.catalogue = '{config.catalogue}', "
                f"env.goals = '{config.goals}'); copy WebShop's data files there, "
                "or play a generated shop with --env.data none"
            )
    digest = hashlib.sha256()
    attributes = _read_object(entries, digest)
    written = _read_object(human, digest) if human else None
    return _stock(
        read_array(items, digest),
        attributes,
        written,
        nouns=config.nouns,
        digest=digest,
        item_source=str(items),
        entry_source=str(entries),
    )


@functools.lru_cache(8)
def generated(products: int, goals: str, nouns: str, seed: int = 0) -> Catalogue:
    """Return the generated shop, one for all factories of a process."""
    need_rapidfuzz()
    records = generator.records(products, seed)
    items, entries, human = records
    return _stock(
        items,
        entries,
        human if goals == "human" else None,
        nouns=nouns,
        digest=hashlib.sha256(json.dumps(records).encode()),
        item_source="generated",
        entry_source="generated",
    )


def _stock(
    items: Iterable[Any],
    entries: dict[str, Any],
    written: Any,
    *,
    nouns: str,
    digest: Any,
    item_source: str,
    entry_source: str,
) -> Catalogue:
    """Make the catalogue from the files' contents. `written` is None if goals are synthetic."""
    nouns = choose_nouns(nouns)
    rng = random.Random(SEED)
    products = list(_clean(items, entries, rng, item_source, entry_source))
    goals: list[Goal] = []
    for product in products:
        asin = product.asin
        if written is not None:
            goals += _human_goals(product, written.get(asin, []), rng, f"{HUMAN}, {asin}")
        elif asin in entries:
            goals += _synthetic_goals(product, entries[asin], rng, f"{entry_source}, {asin}")
        else:
            raise UserError(f"{entry_source} has no '{asin}': it belongs to another products file")
    if len(goals) < 2:
        kind = "synthetic" if written is None else "human"
        raise UserError(
            f"{item_source}: {len(products)} products make {len(goals)} goals with "
            f"env.goals = '{kind}'; at least 2 are needed, one of them for evaluation"
        )
    random.Random(SEED).shuffle(goals)
    return Catalogue(products, goals, digest.hexdigest(), nouns)


def _clean(
    items: Iterable[Any],
    entries: dict[str, Any],
    rng: random.Random,
    source: str,
    entry_source: str,
) -> Iterator[Product]:
    """Return products as the shop shows them.

    Skips the products that the reference skips: those without an asin, with a long one, or with one
    that occurred before.
    """
    used_asins = {"nan"}
    for number, raw in enumerate(items, 1):
        asin = str(raw.get("asin")) if isinstance(raw, dict) else ""
        if len(asin) > 10 or asin in used_asins:
            continue
        used_asins.add(asin)
        item = checked(Item, raw, f"{source}, product {number} ({asin})")
        entry = checked(Entry, entries.get(asin, {}), f"{entry_source}, {asin}")
        has_one_price = len(item.pricing) == 1
        price = item.pricing[0] if has_one_price else rng.uniform(*item.pricing)
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
            price=price,
        )


def _synthetic_goals(product: Product, raw: Any, rng: random.Random, origin: str) -> Iterator[Goal]:
    """Yield a goal for each combination of a product's options, all with the same price limit.

    Yields none if the product has no instruction.
    """
    entry = checked(Entry, raw, origin)
    if entry.instruction is None:
        return
    if not entry.instruction_attributes:
        raise UserError(f"{origin}: an instruction without 'instruction_attributes'")
    limit, ending = _limit(product, rng)
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        wishes = ", and ".join(f"{name}: {value}" for name, value in options.items())
        instruction = f"{entry.instruction} with {wishes}" if wishes else entry.instruction
        yield Goal(
            product, instruction + ending, tuple(entry.instruction_attributes), options, limit
        )


def _human_goals(product: Product, written: Any, rng: random.Random, origin: str) -> Iterator[Goal]:
    """Yield a goal for each instruction with attributes that was written for a product."""
    for number, raw in enumerate(checked(list[Any], written, origin), 1):
        if isinstance(raw, dict) and raw.get("instruction_attributes") == []:
            continue
        entry = checked(HumanInstruction, raw, f"{origin}, instruction {number}")
        limit, ending = _limit(product, rng)
        options = {str(i): value for i, value in enumerate(entry.instruction_options)}
        instruction = entry.instruction.strip(".") + ending
        yield Goal(product, instruction, tuple(entry.instruction_attributes), options, limit)


def _limit(product: Product, rng: random.Random) -> tuple[float, str]:
    """Draw (price limit of a goal, what its instruction says about it)."""
    candidates = [limit for limit in LIMITS if limit > product.price][:4]
    if len(candidates) < 2:
        return math.inf, ""
    limit = max(rng.sample(candidates, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _text(product: Product) -> str:
    """Return the text of a product that is searched."""
    options = ", and ".join(
        f"{name}: {', '.join(values)}" for name, values in product.options.items()
    )
    return " ".join([product.title, product.description, *product.bullets[:1], options]).lower()


# --- reading


def read_array(path: Path, digest: Any) -> Iterator[Any]:
    """Yield the elements of a JSON array one at a time. The full products file has 5 GB.

    `digest` is updated with all bytes.
    """
    decode = json.JSONDecoder().raw_decode
    gap = re.compile(r"\s*\[\s*")  # before the first element; later, between two elements
    text = ""
    position = 0
    number = 1
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while True:
                try:
                    match = gap.match(text, position)
                    if match is None:
                        raise json.JSONDecodeError("no array", text, position)
                    position = match.end()
                    gap = re.compile(r"[\s,]*")
                    if text[position : position + 1] == "]":
                        digest.update(file.read().encode())
                        return
                    value, position = decode(text, position)
                except json.JSONDecodeError as error:
                    # The text read so far ends within this element, so read on.
                    chunk = file.read(CHUNK) if len(text) - position < LARGEST else ""
                    if not chunk:
                        problem = f"broken or cut short in product {number} ({error.msg})"
                        raise UserError(f"{path}: {problem}; download it again") from None
                    digest.update(chunk.encode())
                    text = text[position:] + chunk
                    position = 0
                else:
                    yield value
                    number += 1
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; download it again") from None


def _read_object(path: Path, digest: Any) -> dict[str, Any]:
    file_bytes = path.read_bytes()
    digest.update(file_bytes)
    try:
        return checked(dict[str, Any], json.loads(file_bytes), str(path))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {error.lineno}: broken or cut short ({error.msg}); download it again"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; download it again") from None
