"""WebShop's reward by hand: r_type * (attributes + options + [price <= limit]) / (|attributes| + |options| + 1)."""

import dataclasses
import importlib.machinery
import math

import pytest

from paw.envs.webshop.reward import Goal, Product, base_colour, choose_nouns, reward, title_nouns, type_reward
from paw.errors import UserError

SHIRT = Product(
    asin="B000000001",
    title="Vero Men's Slim Fit Shirt for Work",
    category="fashion",
    query="men's shirts",
    product_category="Clothing › Men › Shirts",
    description="Woven from Organic Cotton.",
    bullets=("Machine wash", "Button closure keeps it neat"),
    attributes=("slim fit", "long sleeves"),
    options={"color": ("navy blue", "wine red"), "size": ("large", "x-large")},
    price_text="$29.5",
    price=29.5,
)
BOTH = {"color": "navy blue", "size": "large"}
GOAL = Goal(SHIRT, "i need a shirt", attributes=("slim fit", "machine wash"), options=BOTH, price_upper=40.0)


def earned(product: Product = SHIRT, chosen: dict[str, str] = BOTH, **goal) -> float:
    return reward(product, dataclasses.replace(GOAL, **goal), chosen, "rules")


def test_each_part_is_one_of_five():
    assert earned() == 1.0
    assert earned(chosen={"color": "navy blue"}) == 4 / 5
    assert earned(chosen={}) == 3 / 5
    assert earned(attributes=("slim fit", "stretch")) == 4 / 5
    assert earned(attributes=("stretch", "velvet"), chosen={}, price_upper=20.0) == 0.0
    assert earned(options={}, chosen=BOTH) == 1.0  # what was not asked for costs nothing
    assert earned(options={}, chosen={}, attributes=("slim fit", "stretch")) == 2 / 3
    assert [earned(price_upper=limit) for limit in (29.0, 29.49, 29.5, math.inf)] == [4 / 5, 4 / 5, 1.0, 1.0]


def test_an_attribute_may_stand_anywhere():
    """In an attribute (also with all its words, or nearly), a bullet, the description lower-cased, or the title."""
    found = ["long sleeve", "fit slim", "machine wash", "organic cotton", "vero"]
    absent = ["washwear", "short sleeve", "Organic Cotton"]  # not lower-cased itself, as in the reference
    assert [earned(attributes=(attribute,)) for attribute in found] == [1.0] * 5
    assert [earned(attributes=(attribute,)) for attribute in absent] == [3 / 4] * 3


def test_a_ratio_is_rounded_before_it_is_compared():
    product = dataclasses.replace(SHIRT, attributes=("aaaaaab", 23 * "a" + "bbbb"))
    assert earned(product, attributes=("aaaaaac",)) == 1.0  # 12 / 14: 86
    assert earned(product, attributes=(23 * "a" + "cccc",)) == 3 / 4  # 46 / 54: 85.2, so 85


def test_options_of_people_are_compared_by_value_synthetic_ones_with_their_name():
    for wanted, chosen, by_value, with_name in (
        ("navy blue", "light blue", 1, 1),  # both are blue
        ("navy blue", "navy", 0, 1),  # "navy blue" counts as blue, the first in the alphabet
        ("red", "dark red", 0, 0),  # "dark" comes first
        ("red", "wine red", 1, 1),
        ("red", "color", 0, 0),  # a base colour counts without its name
        ("deep sea", "shallow sea", 0, 0),
        ("black and white", "white", 0, 1),  # black
        ("large", "x-large", 1, 0),  # all of its words; of "color large", one of two
        ("8 oz (pack of 2)", "8 oz, pack of 2", 1, 1),
        ("20 inch", "24 inch", 1, 0),  # ratio 86
        ("standard", "standard", 1, 0),  # both are tan; tan is no word of "color standard"
        ("", "", 0, 0),
    ):
        assert earned(options={"0": wanted}, chosen={"style": chosen}) == (3 + by_value) / 4, (wanted, chosen)
        assert earned(options={"color": wanted}, chosen={"color": chosen}) == (3 + with_name) / 4, (wanted, chosen)


def test_one_choice_may_meet_two_wishes():
    assert earned(options={"0": "red", "1": "rose red"}, chosen={"color": "wine red"}) == 1.0
    assert earned(options={"0": "red", "1": "rose"}, chosen={"color": "wine red"}) == 4 / 5


def test_base_colours():
    texts = ("", "black forest", "violet lavender", "steelivy fuchsia", "dark grey", "Red", "standard", "shop")
    assert [*map(base_colour, texts)] == ["", "black", "lavender", "fuchsia", "dark", "Red", "tan", "shop"]


LONG = "Aa Bb Cc Dd Ee Ff Gg Hh Ii Jj Kk"  # eleven nouns
SAME = {"query": "men's shirts"}


def test_the_type():
    for wanted, title, others, r_type in (
        (LONG, "Aa Bb Cc", {}, 1.0),  # 3 of 11: more than 0.2
        (LONG, "Aa Bb", {}, 0.5),  # 2 of 11
        (LONG, "Aa Bb", SAME, 1.0),
        (LONG, "Aa Bb", {"product_category": "Men › Sale › Clothing"}, 1.0),  # two parts of the path, in any order
        (LONG, "Aa Bb", {"product_category": "Men › Men › Shoes"}, 0.5),
        (LONG, "Aa", SAME, 0.1),  # 1 of 11: less than 0.1, and the same query does not save it
        (LONG, "Zz", SAME, 0.0),
        (LONG[:-3], "Aa", {}, 0.5),  # 1 of 10
        ("Aa Aa Aa Aa Bb", "Aa", {}, 0.5),  # 1 of 5
        ("12 34", "Aa", {}, 0.5),  # no nouns: 0.2
    ):
        product = dataclasses.replace(SHIRT, title=title, **({"query": "x", "product_category": "y"} | others))
        goal = dataclasses.replace(GOAL, product=dataclasses.replace(SHIRT, title=wanted), attributes=("slim fit",))
        assert type_reward(product, goal, "rules") == r_type == reward(product, goal, BOTH, "rules"), (wanted, title)


def test_nouns_are_words_that_are_no_function_words():
    title = "PEAK Men's High-Top Shoes for the Gym, 2pcs (Size 12) & More"
    assert title_nouns(title, "rules") == ("peak", "men", "high", "top", "shoes", "gym", "2pcs", "size")


def test_titles_of_the_reference_score_as_its_tests_say():
    """Its expectations are for spaCy's model: within 0.03 of them."""
    cord = "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"
    panasonic = (
        "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home Theater System"
    )
    sneakers = "Mens D.O.N. Issue 2 Gca Basketball Sneakers Shoes Casual - Off White"
    peak = "PEAK High Top Mens Basketball Shoes Lou Williams Streetball Master Breathable Non Slip Outdoor Sneakers"
    for wanted, bought, score in (
        (sneakers, peak, 1 / 3),
        (f"{cord} Home Theater System Subwoofer", panasonic, 0.3),
        (cord, panasonic, 0.15),
        ("Rusticware 921ORB Kitchen and Bath Cabinet Knob", "Minkissy Stainless Steel Eyebrow Tweezers", 0.0),
    ):
        own = title_nouns(wanted, "rules")
        assert len({*own} & {*title_nouns(bought, "rules")}) / len(own) == pytest.approx(score, abs=0.03)


def test_spacy_finds_the_same_nouns():
    pytest.importorskip("en_core_web_sm", reason="spaCy's English model is not installed")
    title = "Rusticware 921ORB Kitchen and Bath Cabinet Knob"
    assert title_nouns(title, "spacy") == title_nouns(title, "rules")


def test_which_nouns(monkeypatch: pytest.MonkeyPatch):
    installed = {"spacy"}
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: importlib.machinery.ModuleSpec(name, None) if name in installed else None,
    )
    assert (choose_nouns("auto"), choose_nouns("rules")) == ("rules", "rules")
    with pytest.raises(UserError, match=r"env.nouns = 'spacy' needs spaCy and en_core_web_sm: pip install spacy"):
        choose_nouns("spacy")
    installed.add("en_core_web_sm")
    assert (choose_nouns("auto"), choose_nouns("spacy"), choose_nouns("rules")) == ("spacy", "spacy", "rules")
