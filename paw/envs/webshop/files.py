"""WebShop's JSON files, and products cleaned as the reference's `load_products` does (web_agent_site/engine/engine.py).

The full products file has 5 GB: it is decoded product by product, and only what the shop shows is kept.
"""

import codecs
import json
import random
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from sys import intern
from typing import Any, Protocol

from paw.envs.webshop.types import Product
from paw.errors import UserError

CHUNK = 1 << 20
LARGEST = 1 << 24
"""Characters of one product; a longer one is broken JSON."""
OPENING, BETWEEN = re.compile(r"\s*\[\s*"), re.compile(r"[\s,]*")


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def read_array(path: Path, digest: Digest) -> Iterator[tuple[str, Any]]:
    """The elements of a JSON array, one at a time, and where each stands; all bytes of the file go to `digest`.

    Raises:
        UserError: the file holds no array, is broken or cut short; names its line.
    """
    decode, scan = codecs.getincrementaldecoder("utf-8")().decode, json.JSONDecoder().raw_decode
    text, at, line, number, between = "", 0, 1, 1, OPENING
    with path.open("rb") as file:
        while True:
            start = at
            try:
                if (gap := between.match(text, at)) is None:
                    raise json.JSONDecodeError("no array", text, at)
                at, between = gap.end(), BETWEEN
                line += text.count("\n", start, at)
                start = at
                if text[at : at + 1] == "]":
                    digest.update(file.read())
                    return
                value, at = scan(text, at)
            except json.JSONDecodeError as error:
                chunk = file.read(CHUNK) if len(text) - at < LARGEST else b""
                if not chunk:
                    line += text.count("\n", start, error.pos)
                    problem = f"broken or cut short in product {number} ({error.msg})"
                    raise UserError(f"{path}, line {line}: {problem}; download it again") from None
                digest.update(chunk)
                try:
                    text, at = text[at:] + decode(chunk), 0
                except UnicodeDecodeError:
                    raise UserError(f"{path}, line {line} or later: no UTF-8; download it again") from None
            else:
                yield f"{path}, line {line}, product {number}", value
                line += text.count("\n", start, at)
                number += 1


def read_object(path: Path, digest: Digest) -> dict[str, Any]:
    """A JSON object. UserError if the file is broken or holds something else."""
    data = path.read_bytes()
    digest.update(data)
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: broken or cut short ({error.msg}); download it again") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: no UTF-8; download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not an object with products' asins as keys")
    return value


def clean(
    records: Iterable[tuple[str, Any]], entries: dict[str, Any], rng: random.Random, source: str
) -> Iterator[Product]:
    """Products as the shop shows them. Skips what the reference skips: no asin, a long one, one seen before.

    Args:
        records: where it stands and the product, for each element of the products file.
        entries: asin -> {"attributes", ...}, the attributes file.
        rng: draws prices within a range, in the order of the products.
        source: of `entries`, as errors name it.

    Raises:
        UserError: a product lacks a key or has something else under it.
    """
    seen: set[str] = set()
    for where, record in records:
        if not isinstance(record, dict):
            raise UserError(f"{where}: {record!r:.60} is not an object")
        asin = need(record, "asin", where)
        if asin == "nan" or len(asin) > 10 or asin in seen:
            continue
        seen.add(asin)
        where = f"{where} ({asin})"
        title = need(record, "name", where)
        bullets = _field(record, "small_description", where)
        prices = _prices(record.get("pricing"), where)
        entry = entries.get(asin, {})
        if not isinstance(entry, dict):
            raise UserError(f"{source}, {asin}: {entry!r:.60} is not an object")
        yield Product(
            asin=asin,
            title=title,
            category=intern(need(record, "category", where)),
            query=intern(need(record, "query", where).lower().strip()),
            product_category=intern(need(record, "product_category", where)),
            description=need(record, "full_description", where, nullable=True),
            bullets=texts(bullets if isinstance(bullets, list) else [bullets or ""], "small_description", where),
            attributes=texts(entry.get("attributes", []), "attributes", f"{source}, {asin}"),
            options=_options(record, where),
            price_text=" to ".join(f"${price}" for price in prices),
            price=prices[0] if len(prices) == 1 else rng.uniform(*prices),
        )


def need(record: dict[str, Any], key: str, where: str, *, nullable: bool = False) -> str:
    """The text under `key`. UserError if it is missing or no text."""
    value = _field(record, key, where)
    if nullable and value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: '{key}' is {value!r:.60}, not a text")
    return value


def texts(values: Any, key: str, where: str) -> tuple[str, ...]:
    """`values` if it is a list of texts, else UserError."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{where}: '{key}' is {values!r:.60}, not a list of texts")
    return tuple(values)


def _field(record: dict[str, Any], key: str, where: str) -> Any:
    if key not in record:
        raise UserError(f"{where} has no '{key}'")
    return record[key]


def _prices(pricing: Any, where: str) -> list[float]:
    """ "$12.99" or "$10.00 - $20.00"; without any, 100 dollars."""
    if not pricing:
        return [100.0]
    try:
        return [float(Decimal(re.sub(r"[^\d.]", "", part))) for part in pricing.split("$")[1:3] or [""]]
    except (AttributeError, InvalidOperation):
        raise UserError(f"{where}: 'pricing' is {pricing!r:.60}, not like '$12.99'") from None


def _options(record: dict[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    options = _field(record, "customization_options", where)
    try:
        return {
            name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
            for name, values in (options or {}).items()
            if values is not None
        }
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{where}: 'customization_options' is not like {{name: [{{'value': text}}, ...]}}") from None
