"""What sessions have to buy, as the reference's `get_goals` makes it (web_agent_site/engine/goal.py)."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

from paw.envs.webshop.files import need, texts
from paw.envs.webshop.types import Goal, Product
from paw.errors import UserError

LIMITS = [10.0 * i for i in range(1, 100)]
"""Price limits, US dollars. A goal's is the larger of two drawn from the four next above its product's price."""


def human_goals(
    products: Iterable[Product], instructions: dict[str, Any], rng: random.Random, source: str
) -> Iterator[Goal]:
    """One goal for each instruction written for a product; those without attributes are skipped.

    Args:
        instructions: asin -> [{"instruction", "instruction_attributes", "instruction_options": values}, ...].
    """
    for product in products:
        written = instructions.get(product.asin, [])
        if not isinstance(written, list):
            raise UserError(f"{source}, {product.asin}: {written!r:.60} is not a list of instructions")
        for number, entry in enumerate(written, 1):
            where = f"{source}, {product.asin}, instruction {number}"
            if not isinstance(entry, dict):
                raise UserError(f"{where}: {entry!r:.60} is not an object")
            attributes = texts(entry.get("instruction_attributes"), "instruction_attributes", where)
            if not attributes:
                continue
            limit, ending = _limit(product, rng)
            text = need(entry, "instruction", where).strip(".") + ending
            options = texts(entry.get("instruction_options"), "instruction_options", where)
            yield _goal(product, text, attributes, {str(i): value for i, value in enumerate(options)}, limit)


def synthetic_goals(
    products: Iterable[Product], entries: dict[str, Any], rng: random.Random, source: str
) -> Iterator[Goal]:
    """A goal for every combination of options of each product that has an instruction; they share a price limit.

    Args:
        entries: asin -> {"attributes", "instruction", "instruction_attributes"}.
    """
    for product in products:
        where = f"{source}, {product.asin}"
        if product.asin not in entries:
            raise UserError(f"{source} has no '{product.asin}': it belongs to another products file")
        entry = entries[product.asin]
        if entry.get("instruction") is None:
            continue
        instruction = need(entry, "instruction", where)
        attributes = texts(entry.get("instruction_attributes"), "instruction_attributes", where)
        if not attributes:
            raise UserError(f"{where}: an instruction without 'instruction_attributes'")
        limit, ending = _limit(product, rng)
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            options = dict(zip(names, values, strict=True))
            chosen = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = f"{instruction}{' with ' if chosen else ''}{chosen}{ending}"
            yield _goal(product, text, attributes, options, limit)


def _goal(
    product: Product, instruction: str, attributes: tuple[str, ...], options: dict[str, str], limit: float
) -> Goal:
    return Goal(
        asin=product.asin,
        category=product.category,
        query=product.query,
        name=product.title,
        product_category=product.product_category,
        instruction=instruction,
        attributes=attributes,
        options=options,
        price_upper=limit,
    )


def _limit(product: Product, rng: random.Random) -> tuple[float, str]:
    above = [limit for limit in LIMITS if limit > product.price][:4]
    if len(above) < 2:
        return math.inf, ""
    limit = max(rng.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"
