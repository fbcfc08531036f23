"""What the generated shop sells: types of products, the words for them, and the values of their options."""

from dataclasses import dataclass
from pathlib import Path

ROOTS = {
    "beauty": "Beauty & Personal Care",
    "electronics": "Electronics",
    "fashion": "Clothing, Shoes & Jewelry",
    "garden": "Home & Kitchen",
    "grocery": "Grocery & Gourmet Food",
}


@dataclass(frozen=True, slots=True)
class Ware:
    """A type of product."""

    category: str
    query: str
    path: str
    """Below the category's root."""
    nouns: tuple[str, ...]
    """Names of it in titles, singular or as sold."""
    uses: tuple[str, ...]
    """What comes after "for"."""
    adjectives: tuple[str, ...]
    """Attributes that come before the noun, ..."""
    features: tuple[str, ...]
    """... and those after "with"."""
    options: tuple[str, ...]
    """Keys of OPTIONS."""
    prices: tuple[float, float]
    """US dollars."""


OPTIONS = {
    "color": (
        "color",
        "black, white, navy blue, light grey, dark green, wine red, rose pink, khaki, burgundy, lavender, "
        "mustard yellow, teal, coffee brown, ivory, orange, silver",
    ),
    "finish": (
        "color",
        "natural oak, black walnut, espresso brown, white, grey oak, rustic gold, cream, sapphire blue",
    ),
    "clothes": ("size", "x-small, small, medium, large, x-large, xx-large, 3x-large"),
    "shoes": ("size", "5.5, 6, 6.5, 7, 7.5, 8, 8.5, 9, 10, 11"),
    "waist": ("size", "28w x 30l, 30w x 30l, 32w x 30l, 32w x 32l, 34w x 32l, 36w x 34l"),
    "ounces": ("size", "1.7 fl oz, 3.4 fl oz, 6.8 fl oz, 8.5 fl oz, 12 fl oz, 16 fl oz"),
    "pack": (
        "size",
        "4 ounce (pack of 1), 6 ounce (pack of 2), 8 ounce (pack of 4), 10 ounce (pack of 6), 1 pound bag",
    ),
    "bed": ("size", "twin, full, queen, king, california king"),
    "area": ("size", "2 ft x 3 ft, 3 ft x 5 ft, 4 ft x 6 ft, 5 ft x 8 ft, 8 ft x 10 ft"),
    "inches": ("size", "16 inch, 18 inch, 20 inch, 24 inch, 30 inch, 36 inch"),
    "length": ("size", "1.5 feet, 3 feet, 6 feet, 10 feet, 15 feet, 25 feet"),
    "count": ("item package quantity", "1, 2, 3, 5, 10"),
    "storage": ("capacity", "16gb, 32gb, 64gb, 128gb, 256gb, 512gb"),
    "style": ("style", "with carrying case, without case, with charger, starter bundle, travel kit"),
    "scent": ("scent", "lavender mint, citrus, coconut vanilla, rose, unscented, eucalyptus, cedarwood, green tea"),
    "flavor": (
        "flavor name",
        "sea salt, honey mustard, dark chocolate, smoky barbecue, apple cinnamon, lemon, spicy chili, french vanilla, "
        "peanut butter, original",
    ),
    "shade": ("color", "01 ivory, 02 natural beige, 03 caramel, 04 chestnut, 05 espresso, 06 rose, 07 coral, 08 plum"),
}
"""Key -> option name, values. Their base colours (see `reward`) are words of theirs, so that a goal can be met."""


def _ware(line: str) -> Ware:
    category, query, path, *lists, prices = (cell.strip() for cell in line.split(" | "))
    nouns, uses, adjectives, features, options = (tuple(cell.split(", ")) for cell in lists)
    low, high = map(float, prices.split())
    return Ware(category, query, path, nouns, uses, adjectives, features, options, (low, high))


WARES = [_ware(line) for line in Path(__file__).with_name("wares.txt").read_text(encoding="utf-8").splitlines()[1:]]
