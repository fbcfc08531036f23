"""The shop's stock: products, the goals made from them and the search over them. One is shared by all sessions.

Differences from the reference: prices and price limits are drawn from a generator seeded with 233, as its shuffle of
goals is; its search commands for debugging ("<r>", "<a>", ...) are words; a description or bullets of null are empty.
"""

import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paw.envs.search.retrieval.bm25 import Bm25
from paw.envs.settings import WebshopConfig
from paw.envs.webshop import files, generator
from paw.envs.webshop.goals import human_goals, synthetic_goals
from paw.envs.webshop.nouns import choose
from paw.envs.webshop.reward import require_rapidfuzz
from paw.envs.webshop.types import Goal, Product
from paw.errors import UserError

SEED = 233
HITS = 50
HUMAN = "items_human_ins.json"


class Catalogue:
    """Read-only. UserError if bm25s or PyStemmer is missing."""

    products: list[Product]
    by_asin: dict[str, Product]
    """Keys lower-case."""
    goals: list[Goal]
    """Shuffled: `n_test` to test with, then those to train on."""
    digest: str
    """Hash of the files, or of what was generated."""
    nouns: str
    """How nouns are found: "spacy" or "rules"."""

    def __init__(self, products: list[Product], goals: list[Goal], digest: str, nouns: str) -> None:
        self.products, self.goals, self.digest, self.nouns = products, goals, digest, nouns
        self.by_asin = {product.asin.lower(): product for product in products}
        self._index = Bm25(map(_text, products))

    @property
    def n_test(self) -> int:
        """500 as in the reference, a quarter of fewer than 1,000."""
        return 500 if len(self.goals) >= 1000 else len(self.goals) // 4 or 1

    def search(self, query: str) -> list[Product]:
        """The 50 best products for the lower-cased words, best first; fewer where fewer share a word with them."""
        (hits,) = self._index.top([query.lower()], HITS)
        return [self.products[at] for at, _ in hits]


def load(folder: Path, config: WebshopConfig) -> Catalogue:
    """The user's copy of WebShop's files, of the size that env.catalogue names.

    Raises:
        UserError: a file is missing, broken or lacks something; there are fewer than 2 goals; or a package of the
            extra "webshop" is not installed.
    """
    suffix = "_1000" if config.catalogue == "small" else ""
    items, entries = folder / f"items_shuffle{suffix}.json", folder / f"items_ins_v2{suffix}.json"
    human = [folder / HUMAN] if config.goals == "human" else []
    for path in (items, entries, *human):
        if not path.is_file():
            raise UserError(
                f"{path} is missing (env.data with env.catalogue = '{config.catalogue}', env.goals = "
                f"'{config.goals}'); copy WebShop's data files there, or --env.data none plays a generated shop"
            )
    digest = hashlib.sha256()
    attributes = files.read_object(entries, digest)
    written = files.read_object(human[0], digest) if human else {}
    products = files.read_array(items, digest)
    return _stock(products, attributes, written, config.goals, config.nouns, digest.hexdigest, (items, entries))


def generated(config: WebshopConfig, seed: int = 0) -> Catalogue:
    """The generated shop of env.products products; one for all factories of a process."""
    return _generated(config.products, config.goals, config.nouns, seed)


@functools.lru_cache(8)
def _generated(products: int, goals: str, nouns: str, seed: int) -> Catalogue:
    items, entries, written = generator.records(products, seed)
    digest = hashlib.sha256(json.dumps((items, entries, written)).encode())
    numbered = ((f"generated product {number}", item) for number, item in enumerate(items, 1))
    return _stock(numbered, entries, written, goals, nouns, digest.hexdigest, ("generated products", "their goals"))


def _stock(
    items: Iterable[tuple[str, Any]],
    entries: dict[str, Any],
    written: dict[str, Any],
    kind: str,
    nouns: str,
    digest: Callable[[], str],
    sources: tuple[object, object],
) -> Catalogue:
    require_rapidfuzz()
    chosen, rng = choose(nouns), random.Random(SEED)
    source, entry_source = map(str, sources)
    products = list(files.clean(items, entries, rng, entry_source))
    if kind == "human":
        goals = list(human_goals(products, written, rng, HUMAN))
    else:
        goals = list(synthetic_goals(products, entries, rng, entry_source))
    if len(goals) < 2:
        raise UserError(
            f"{source}: {len(products)} products make {len(goals)} goals with env.goals = '{kind}'; "
            "at least 2 are needed, one of them to test with"
        )
    random.Random(SEED).shuffle(goals)
    return Catalogue(products, goals, digest(), chosen)


def _text(product: Product) -> str:
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return f"{product.title} {product.description} {first} {options}".lower()
