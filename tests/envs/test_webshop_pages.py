"""WebShop's pages and prompts letter by letter, the effect of each action on each page, and the
reward computed by hand."""

import dataclasses
import math

import pytest

from paw.envs.webshop.catalogue import Catalogue
from paw.envs.webshop.prompt import CompactStyle, PaperStyle
from paw.envs.webshop.reward import (
    Goal,
    Product,
    base_colour,
    choose_nouns,
    reward,
    title_nouns,
    type_reward,
)
from paw.envs.webshop.session import Session
from paw.errors import UserError

TASK = "Find me cotton men's shirts with color: red, and size: large, and price lower than 20.00 dollars"


def shirt(number: int, **changes) -> Product:
    texts = {"title": f"Plain Shirt {number}", "description": f"A shirt, number {number}."}
    texts |= {"bullets": ("Cotton: soft.", "Washable."), "price_text": "$12.0 to $15.5"}
    classification = {
        "category": "fashion",
        "query": "men's shirts",
        "product_category": "Clothing › Men › Shirts",
    }
    values = {"options": {"color": ("red", "navy blue"), "size": ("small", "large")}, "price": 13.0}
    identity = {"asin": f"B{number:09d}", "attributes": ("cotton", "machine wash")}
    return Product(**{**texts, **classification, **values, **identity, **changes})


GOAL = Goal(
    shirt(0),
    TASK,
    attributes=("cotton",),
    options={"color": "red", "size": "large"},
    price_upper=20.0,
)
ODD = shirt(
    99,
    asin="B0ODDASIN9",
    title="Tea Mug",
    query="mugs",
    description="",
    bullets=("", "two\nlines "),
    options={
        "style": ("features", "search", "next >", "a [b] c", "red"),
        "color": ("red", "  "),
        "none": (),
    },
)
SHOP = Catalogue([*(shirt(i) for i in range(12)), ODD], [GOAL], "digest", "rules")


def play(*actions: str) -> Session:
    session = Session(SHOP, GOAL)
    for action in actions:
        session.step(action)
    return session


def text(session: Session) -> str:
    return " [SEP] ".join(session.parts)


SHIRTS = "search[plain shirt]"
FIRST = "click[b000000000]"
MUG = ("search[tea mug]", "click[b0oddasin9]")
ITEM = (
    "Back to Search [SEP] < Prev [SEP] color [SEP] red [SEP] navy blue [SEP] size [SEP] small [SEP] large [SEP] "
    "Plain Shirt 0 [SEP] Price: $12.0 to $15.5 [SEP] Rating: N.A. [SEP] "
    "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
)


def test_search_and_results_pages():
    session = play()
    assert text(session) == "Search"
    assert session.available() == [
        "search[<your query>]",
        "click[search]",
    ]
    session.step(SHIRTS)
    item_lines = [f"{p.asin} [SEP] {p.title} [SEP] $12.0 to $15.5" for p in session.hits]
    links = [f"click[{product.asin.lower()}]" for product in session.hits]
    assert text(session) == " [SEP] ".join(
        ["Back to Search", "Page 1 (Total results: 12)", "Next >", *item_lines[:10]]
    )
    assert session.available() == ["click[back to search]", "click[next >]", *links[:10]]
    session.step("click[next >]")
    second = ["Back to Search", "Page 2 (Total results: 12)", "< Prev", "Next >"]
    assert text(session) == " [SEP] ".join([*second, *item_lines[10:]])
    assert session.available() == [
        "click[back to search]",
        "click[< prev]",
        "click[next >]",
        *links[10:],
    ]
    session.step("click[next >]")
    assert (
        text(session) == "Back to Search [SEP] Page 3 (Total results: 12) [SEP] < Prev [SEP] Next >"
    )
    for number in (2, 1, 1):
        session.step("click[< prev]")
        assert session.page == number
    assert (
        text(play("search[zebra]")) == "Back to Search [SEP] Page 1 (Total results: 0) [SEP] Next >"
    )
    # Text after the bracket is ignored.
    assert text(play("search[TEA mug] now")) == text(play("search[tea mug]"))


def test_an_item_its_sub_pages_and_the_purchase():
    session = play(SHIRTS, FIRST)
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert session.clickables == [*buttons, "red", "navy blue", "small", "large"]
    for value in ("red", "Navy Blue", "large"):
        session.step(f"click[{value}]")
        assert text(session) == ITEM  # choices are not shown
    assert session.options == {"color": "navy blue", "size": "large"}
    session.step("click[< prev]")
    assert session.page == 1
    assert session.product is None
    assert session.options == {}
    pages = {
        "description": " [SEP] A shirt, number 0.",
        "features": " [SEP] Cotton: soft. [SEP] Washable.",
    }
    for name, content in {**pages, "reviews": ""}.items():
        session = play(SHIRTS, FIRST, "click[red]", f"click[{name}]", "click[buy now]")
        assert text(session) == f"Back to Search [SEP] < Prev{content}"
        assert session.available() == ["click[back to search]", "click[< prev]"]
        assert session.reward is None
        session.step("click[< prev]")
        assert text(session) == ITEM
        assert session.options == {"color": "red"}
    session.step("click[buy now]")
    assert session.reward == 0.75
    assert session.available() == []
    with pytest.raises(AssertionError):
        session.step("click[buy now]")
    assert play(SHIRTS, FIRST, "click[large]", "click[red]", "click[buy now]").reward == 1.0


@pytest.mark.parametrize(
    "place", [(), (SHIRTS,), (SHIRTS, FIRST, "click[red]"), (SHIRTS, FIRST, "click[reviews]")]
)
def test_illegal_actions_do_nothing_and_a_search_or_back_works_everywhere(place):
    session = play(*place)
    before = (
        text(session),
        session.clickables,
        session.page,
        dict(session.options),
        session.reward,
    )
    for action in (
        *(
            "",
            "click",
            "search",
            "click[]",
            "search[]",
            "buy now",
            "click[search]",
            "click[attributes]",
            "think[hm]",
        ),
        *(
            "click[no such thing]",
            "Click[back to search]",
            "click[back to search",
            "click[red ]",
            "click[a [b] c]",
        ),
    ):
        session.step(action)
        assert (
            text(session),
            session.clickables,
            session.page,
            session.options,
            session.reward,
        ) == before
    assert text(play(*place, "click[back to search]")) == "Search"
    assert text(play(*place, "search[tea mug]")) == text(play("search[tea mug]"))


def test_odd_products():
    session = play(*MUG)
    assert text(session) == (
        "Back to Search [SEP] < Prev [SEP] style [SEP] features [SEP] search [SEP] next > [SEP] a [b] c [SEP] red"
        " [SEP] color [SEP] red [SEP]  [SEP] none [SEP] Tea Mug [SEP] Price: $12.0 to $15.5 [SEP] Rating: N.A. [SEP] "
        "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    for value in ("search", "a [b] c"):  # the reference ignores these clicks
        session.step(f"click[{value}]")
    assert session.options == {}
    session.step("click[next >]")
    session.step("click[red]")  # the last of the two options with that value
    assert session.options == {"style": "next >", "color": "red"}
    session.step("click[features]")  # the sub-page, not the option
    assert text(session) == "Back to Search [SEP] < Prev [SEP]  [SEP] two\nlines"
    assert text(play(*MUG, "click[description]")) == "Back to Search [SEP] < Prev"


# ---- prompts


HEAD = "\nYou are an expert autonomous agent operating in the WebShop e‑commerce environment."
CLOSING = "\n].\n\nNow it's your turn to take one action for the current step.\n"


def test_paper_first_turn():
    assert PaperStyle().prompt(play(), []) == (
        f"{HEAD} \nYour task is to: {TASK}.\n"
        "Your current observation is: 'Search'.\n"
        "Your admissible actions of the current situation are: \n"
        f"[\n'search[<your query>]',\n'click[search]',{CLOSING}"
        "You should first reason step-by-step about the current situation, then think carefully which admissible "
        "action best advances the shopping goal. This reasoning process MUST be enclosed within <think> </think> "
        "tags. \n"
        "Once you've finished your reasoning, you should choose an admissible action for current step and present it "
        "within <action> </action> tags.\n"
    )


def test_paper_later_turn_has_the_last_two_numbered_from_one():
    past_turns = [
        ("'Search'", "fly"),
        ("'Search'", "search[tea mug]"),
        ("'Back to Search' [SEP] 'B0'", "click[b0oddasin9]"),
    ]
    assert PaperStyle(think=False).prompt(play(SHIRTS, FIRST, "click[reviews]"), past_turns) == (
        f"{HEAD}\nYour task is to: {TASK}.\n"
        "Prior to this step, you have already taken 3 step(s). Below are the most recent 2 observations and the "
        "corresponding actions you took: [Observation 2: ''Search'', Action 2: 'search[tea mug]']\n"
        "[Observation 3: ''Back to Search' [SEP] 'B0'', Action 3: 'click[b0oddasin9]']\n"
        "You are now at step 4 and your current observation is: 'Back to Search' [SEP] '< Prev'.\n"
        "Your admissible actions of the current situation are: \n"
        f"[\n'click[back to search]',\n'click[< prev]',{CLOSING}"
        "You should choose an admissible action for current step and present it within <action> </action> tags.\n"
    )


def test_a_paper_prompt_that_gets_too_long_has_no_history():
    style = PaperStyle()
    session = play()
    other_length = len(style.prompt(session, [("", "x")]))
    past_turns = [("y" * (13_000 - other_length), "x")]
    assert len(style.prompt(session, past_turns)) == 13_000
    assert style.prompt(session, [("y" + past_turns[0][0], "x")]) == style.prompt(session, [])
    assert PaperStyle(history=0).prompt(session, [("", "x")]) == style.prompt(session, [])


def test_paper_projection():
    """What both environments share is tested with ALFWorld."""
    unparsed = "<think>a</think>I would like to CLICK[buy now]"
    assert PaperStyle().parse_action(unparsed, {}) == ("ke to click[buy now]", False)
    assert (
        PaperStyle().format_action("click[red]")
        == "<think>I should click[red].</think><action>click[red]</action>"
    )


def test_compact_prompts():
    style = CompactStyle(history=1)
    task = "task:\nsearch men'sShirts\nwith cotton\npick red\npick large\n"
    expected = f"{task}did:\nb\nsee:\n"
    summary = "cotton machineWash"
    assert style.prompt(play(), []) == f"{task}see:\nshop\ncan:\nsearch men'sShirts\nsearch mugs"
    mug_page = play("search[tea mug]")
    assert (
        style.prompt(mug_page, [("", "a"), ("", "b")])
        == f"{expected}page 1\na: {summary}\ncan:\nopen a\nnext\nleave"
    )
    chosen = play(SHIRTS, FIRST, "click[navy blue]")
    assert style.prompt(chosen, [("", "b")]) == (
        f"{expected}product: {summary}\ncolor: red navyBlue\nsize: small large\nchosen: navyBlue\n"
        "can:\npick red\npick navyBlue\npick small\npick large\nbuy\nprevious\nleave"
    )
    too_expensive = Session(Catalogue([shirt(1, price=20.01)], [GOAL], "", "rules"), GOAL)
    too_expensive.step(SHIRTS)
    assert style.observation(too_expensive) == f"page 1\na: {summary} dear"
    assert style.actions(play())["search men'sShirts"].startswith(
        "search[men's shirts men's shirt button down"
    )
    assert style.actions(play())["search mugs"] == "search[mugs]"
    assert list(style.actions(play(SHIRTS, "click[next >]")))[2:] == ["next", "previous", "leave"]
    actions = style.actions(chosen)
    assert actions["pick navyBlue"] == "click[navy blue]"
    assert actions["buy"] == "click[buy now]"
    for offered in (actions, style.actions(play()), style.actions(play(SHIRTS))):
        assert all(
            style.parse_action(style.format_action(name), offered) == (name, True)
            for name in offered
        )
        assert style.parse_action("\nopen z", offered) == ("open z", False)


# ---- the reward: r_type * (attributes + options + [price <= limit]) / (|attributes| + |options| +
# 1)

SHIRT = shirt(
    0,
    title="Vero Men's Slim Fit Shirt for Work",
    description="Woven from Organic Cotton.",
    bullets=("Machine wash", "Button closure keeps it neat"),
    attributes=("slim fit", "long sleeves"),
    price=29.5,
)
BOTH = {"color": "navy blue", "size": "large"}
WISH = Goal(
    SHIRT, "i need a shirt", attributes=("slim fit", "machine wash"), options=BOTH, price_upper=40.0
)


def earned(product: Product = SHIRT, chosen: dict[str, str] = BOTH, **goal) -> float:
    return reward(product, dataclasses.replace(WISH, **goal), chosen, "rules")


def test_each_part_is_one_of_five():
    assert earned() == 1.0
    assert earned(chosen={"color": "navy blue"}) == 4 / 5
    assert earned(chosen={}) == 3 / 5
    assert earned(attributes=("slim fit", "stretch")) == 4 / 5
    assert earned(attributes=("stretch", "velvet"), chosen={}, price_upper=20.0) == 0.0
    assert earned(options={}, chosen=BOTH) == 1.0  # choices that were not asked for cost nothing
    assert earned(options={}, chosen={}, attributes=("slim fit", "stretch")) == 2 / 3
    assert [earned(price_upper=limit) for limit in (29.0, 29.49, 29.5, math.inf)] == [
        4 / 5,
        4 / 5,
        1.0,
        1.0,
    ]


def test_an_attribute_may_stand_anywhere():
    """An attribute counts if it is found in one of the product's attributes (or has all of its
    words, or nearly), in a bullet, in the lower-cased description, or in the title."""
    present = ["long sleeve", "fit slim", "machine wash", "organic cotton", "vero"]
    # The wanted attribute is not lower-cased, as in the reference.
    absent = ["washwear", "short sleeve", "Organic Cotton"]
    assert [earned(attributes=(attribute,)) for attribute in present] == [1.0] * 5
    assert [earned(attributes=(attribute,)) for attribute in absent] == [3 / 4] * 3
    # Ratios are rounded.
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
        ("standard", "standard", 1, 0),  # both are tan, which is not a word of "color standard"
        ("", "", 0, 0),
    ):
        assert earned(options={"0": wanted}, chosen={"style": chosen}) == (3 + by_value) / 4, (
            wanted,
            chosen,
        )
        assert earned(options={"color": wanted}, chosen={"color": chosen}) == (3 + with_name) / 4, (
            wanted,
            chosen,
        )


def test_one_choice_may_meet_two_wishes_and_base_colours():
    assert earned(options={"0": "red", "1": "rose red"}, chosen={"color": "wine red"}) == 1.0
    assert earned(options={"0": "red", "1": "rose"}, chosen={"color": "wine red"}) == 4 / 5
    texts = (
        "",
        "black forest",
        "violet lavender",
        "steelivy fuchsia",
        "dark grey",
        "Red",
        "standard",
        "shop",
    )
    assert [*map(base_colour, texts)] == [
        "",
        "black",
        "lavender",
        "fuchsia",
        "dark",
        "Red",
        "tan",
        "shop",
    ]


LONG = "Aa Bb Cc Dd Ee Ff Gg Hh Ii Jj Kk"  # eleven nouns
SAME = {"query": "men's shirts"}


def test_the_type():
    for wanted, title, others, r_type in (
        (LONG, "Aa Bb Cc", {}, 1.0),  # 3 of 11: more than 0.2
        (LONG, "Aa Bb", {}, 0.5),  # 2 of 11
        (LONG, "Aa Bb", SAME, 1.0),
        # Two parts of the path match, in any order.
        (LONG, "Aa Bb", {"product_category": "Men › Sale › Clothing"}, 1.0),
        (LONG, "Aa Bb", {"product_category": "Men › Men › Shoes"}, 0.5),
        (LONG, "Aa", SAME, 0.1),  # 1 of 11: less than 0.1, and the same query does not save it
        (LONG, "Zz", SAME, 0.0),
        (LONG[:-3], "Aa", {}, 0.5),  # 1 of 10
        ("Aa Aa Aa Aa Bb", "Aa", {}, 0.5),  # 1 of 5
        ("12 34", "Aa", {}, 0.5),  # no nouns: 0.2
    ):
        product = dataclasses.replace(
            SHIRT, title=title, **({"query": "x", "product_category": "y"} | others)
        )
        wanted_goal = dataclasses.replace(
            WISH, product=dataclasses.replace(SHIRT, title=wanted), attributes=("slim fit",)
        )
        assert (
            type_reward(product, wanted_goal, "rules")
            == r_type
            == reward(product, wanted_goal, BOTH, "rules")
        ), (wanted, title)


def test_nouns_of_titles():
    """These are the shares that the reference's tests expect of spaCy's model, within 0.03."""
    cord = (
        "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"
    )
    lead = "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home Theater System"
    knob = "Rusticware 921ORB Kitchen and Bath Cabinet Knob"
    sneakers = "Mens D.O.N. Issue 2 Gca Basketball Sneakers Shoes Casual - Off White"
    peak = "PEAK High Top Mens Basketball Shoes Lou Williams Streetball Master Breathable Non Slip Outdoor Sneakers"
    for wanted, bought, noun_share in (
        (sneakers, peak, 1 / 3),
        (f"{cord} Home Theater System Subwoofer", lead, 0.3),
        (cord, lead, 0.15),
        (knob, "Minkissy Stainless Steel Eyebrow Tweezers", 0.0),
    ):
        wanted_nouns = title_nouns(wanted, "rules")
        assert len({*wanted_nouns} & {*title_nouns(bought, "rules")}) / len(
            wanted_nouns
        ) == pytest.approx(noun_share, abs=0.03)
    title = "PEAK Men's High-Top Shoes for the Gym, 2pcs (Size 12) & More"
    assert title_nouns(title, "rules") == (
        "peak",
        "men",
        "high",
        "top",
        "shoes",
        "gym",
        "2pcs",
        "size",
    )
    pytest.importorskip("en_core_web_sm", reason="spaCy's English model is not installed")
    assert title_nouns(knob, "spacy") == title_nouns(knob, "rules")


def test_which_nouns(monkeypatch: pytest.MonkeyPatch):
    installed = {"spacy"}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name in installed else None
    )
    assert choose_nouns("auto") == "rules"
    assert choose_nouns("rules") == "rules"
    with pytest.raises(
        UserError, match=r"env.nouns = 'spacy' needs spaCy and en_core_web_sm: pip install spacy"
    ):
        choose_nouns("spacy")
    installed.add("en_core_web_sm")
    assert choose_nouns("auto") == "spacy"
    assert choose_nouns("spacy") == "spacy"
    assert choose_nouns("rules") == "rules"
