"""The shop's pages as text: the visible parts of the reference's HTML, in order, joined by " [SEP] ".

Source: web_agent_site/templates of WebShop and `convert_html_to_text` of its text environment. An empty text leaves no
part, as it leaves no node in the HTML; one of blanks alone leaves an empty part, unless it breaks the line.
"""

import json
from collections.abc import Sequence

from paw.envs.webshop.types import Product

SEPARATOR = " [SEP] "
PER_PAGE = 10
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")


def search_page(instruction: str) -> list[str]:
    return ["WebShop", *_header(instruction), "Search"]


def results_page(instruction: str, page: int, products: Sequence[Product], total: int) -> list[str]:
    """Page `page` (from 1), with its `products`, of `total` found."""
    links = [PREVIOUS, NEXT] if page > 1 else [NEXT]
    items = [text for product in products for text in _texts(product.asin, product.title, product.price_text)]
    return [*_header(instruction), BACK, f"Page {page} (Total results: {total})", *links, *items]


def item_page(instruction: str, product: Product, buttons: Sequence[str] = SUB_PAGES[:3]) -> list[str]:
    """A product; which of its options are chosen does not show."""
    options = [text for name, values in product.options.items() for text in _texts(name, *values)]
    title, price = _texts(product.title), f"Price: {product.price_text}".strip()
    return [*_header(instruction), BACK, PREVIOUS, *options, *title, price, "Rating: N.A.", *buttons, BUY]


def sub_page(instruction: str, product: Product, name: str) -> list[str]:
    """One of SUB_PAGES. The catalogue has no reviews: that one is empty."""
    match name:
        case "Description":
            texts = _texts(product.description)
        case "Features":
            texts = [bullet.strip() for bullet in product.bullets]
        case "Attributes":
            kinds = _texts(product.category, product.query, product.product_category)
            texts = [*(attribute.strip() for attribute in product.attributes), *kinds]
        case _:
            texts = []
    return [*_header(instruction), BACK, PREVIOUS, *texts]


def final_page(product: Product, options: dict[str, str], reward: float) -> list[str]:
    """After the purchase. It tells the reward, so no agent is shown it."""
    bought = ["Purchased", "asin", product.asin, "options", json.dumps(options, sort_keys=True), "attrs", "None"]
    bought += [text for name in ("category", "query", "product category") for text in (name, "None")]
    goal = ["Target", "asin", "options", "attrs", "price upper", "instuction text"]
    goal += ["category", "product category", "query", "Goal", "None"]
    head = ["Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)"]
    score = ["Reward", "Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None"]
    return [*head, *bought, *goal, *score]


def _header(instruction: str) -> list[str]:
    return ["Instruction:", *_texts(instruction)]


def _texts(*texts: str) -> list[str]:
    """The parts that these texts leave, each the whole content of an HTML element."""
    return [text.strip() for text in texts if text.strip() or (text and "\n" not in text)]
