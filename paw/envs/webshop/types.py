"""What a shop is made of: products and goals. Read-only, shared by all sessions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """One product, cleaned as the reference's `load_products` does (web_agent_site/engine/engine.py)."""

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
    """Drawn within the pricing; what a goal's limit is compared with."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a session has to buy."""

    asin: str
    """The product it was made from. Another that fits is as good."""
    category: str
    query: str
    name: str
    """Title of that product."""
    product_category: str
    instruction: str
    """As the session shows it, with the price limit where it has one."""
    attributes: tuple[str, ...]
    options: dict[str, str]
    """Option name -> wanted value. Human goals know values only: there the names are "0", "1", ..."""
    price_upper: float
    """Largest price, US dollars; infinite without a limit."""
