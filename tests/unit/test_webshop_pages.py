"""WebShop's pages and prompts letter by letter, and what each action does on each of them."""

import pytest

from paw.envs.webshop.catalogue import Catalogue
from paw.envs.webshop.prompt import CompactStyle, PaperStyle
from paw.envs.webshop.reward import Goal, Product
from paw.envs.webshop.session import Session

TASK = "Find me cotton men's shirts with color: red, and size: large, and price lower than 20.00 dollars"


def shirt(i: int, **changes) -> Product:
    values = {
        "asin": f"B{i:09d}",
        "title": f"Plain Shirt {i}",
        "category": "fashion",
        "query": "men's shirts",
        "product_category": "Clothing › Men › Shirts",
        "description": f"A shirt, number {i}.",
        "bullets": ("Cotton: soft.", "Washable."),
        "attributes": ("cotton", "machine wash"),
        "options": {"color": ("red", "navy blue"), "size": ("small", "large")},
        "price_text": "$12.0 to $15.5",
        "price": 13.0,
    }
    return Product(**{**values, **changes})


GOAL = Goal(shirt(0), TASK, attributes=("cotton",), options={"color": "red", "size": "large"}, price_upper=20.0)
ODD = shirt(
    99,
    asin="B0ODDASIN9",
    title="Tea Mug",
    query="mugs",
    description="",
    bullets=("", "two\nlines "),
    options={"style": ("features", "search", "next >", "a [b] c", "red"), "color": ("red", "  "), "none": ()},
)
SHOP = Catalogue([*(shirt(i) for i in range(12)), ODD], [GOAL], "digest", "rules")


def play(*actions: str) -> Session:
    session = Session(SHOP, GOAL)
    for action in actions:
        session.step(action)
    return session


def text(session: Session) -> str:
    return " [SEP] ".join(session.parts)


SHIRTS, FIRST, MUG = "search[plain shirt]", "click[b000000000]", ("search[tea mug]", "click[b0oddasin9]")
ITEM = (
    "Back to Search [SEP] < Prev [SEP] color [SEP] red [SEP] navy blue [SEP] size [SEP] small [SEP] large [SEP] "
    "Plain Shirt 0 [SEP] Price: $12.0 to $15.5 [SEP] Rating: N.A. [SEP] "
    "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
)


def test_search_and_results_pages():
    session = play()
    assert text(session) == "Search"
    assert session.available() == ["search[<your query>]", "click[search]"]
    session.step(SHIRTS)
    items = [f"{p.asin} [SEP] {p.title} [SEP] $12.0 to $15.5" for p in session.hits]
    links = [f"click[{product.asin.lower()}]" for product in session.hits]
    assert len(items) == 12
    assert text(session) == " [SEP] ".join(["Back to Search", "Page 1 (Total results: 12)", "Next >", *items[:10]])
    assert session.available() == ["click[back to search]", "click[next >]", *links[:10]]
    session.step("click[next >]")
    second = ["Back to Search", "Page 2 (Total results: 12)", "< Prev", "Next >"]
    assert text(session) == " [SEP] ".join([*second, *items[10:]])
    assert session.available() == ["click[back to search]", "click[< prev]", "click[next >]", *links[10:]]
    session.step("click[next >]")
    assert text(session) == "Back to Search [SEP] Page 3 (Total results: 12) [SEP] < Prev [SEP] Next >"
    for page in (2, 1, 1):
        session.step("click[< prev]")
        assert session.page == page
    assert text(play("search[zebra]")) == "Back to Search [SEP] Page 1 (Total results: 0) [SEP] Next >"
    assert text(play("search[TEA mug] now")) == text(play("search[tea mug]"))  # what follows the bracket is ignored


def test_item_page_does_not_show_what_is_chosen():
    session = play(SHIRTS, FIRST)
    assert text(session) == ITEM
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert session.clickables == [*buttons, "red", "navy blue", "small", "large"]
    for value in ("red", "Navy Blue", "large"):
        session.step(f"click[{value}]")
    assert text(session) == ITEM and session.options == {"color": "navy blue", "size": "large"}
    session.step("click[< prev]")
    assert (session.page, session.product, session.options) == (1, None, {})


def test_sub_pages_and_back_with_the_options_kept():
    pages = {"description": " [SEP] A shirt, number 0.", "features": " [SEP] Cotton: soft. [SEP] Washable."}
    for name, rest in {**pages, "reviews": ""}.items():
        session = play(SHIRTS, FIRST, "click[red]", f"click[{name}]", "click[buy now]")
        assert text(session) == f"Back to Search [SEP] < Prev{rest}"
        assert session.available() == ["click[back to search]", "click[< prev]"] and session.reward is None
        session.step("click[< prev]")
        assert (text(session), session.options) == (ITEM, {"color": "red"})


def test_the_purchase_ends_with_the_reward():
    session = play(SHIRTS, FIRST, "click[large]", "click[red]", "click[buy now]")
    assert (session.reward, session.available()) == (1.0, [])
    assert play(SHIRTS, FIRST, "click[red]", "click[buy now]").reward == 0.75
    with pytest.raises(AssertionError):
        session.step("click[buy now]")


@pytest.mark.parametrize("place", [(), (SHIRTS,), (SHIRTS, FIRST, "click[red]"), (SHIRTS, FIRST, "click[reviews]")])
def test_illegal_actions_do_nothing_and_a_search_or_back_works_everywhere(place):
    session = play(*place)
    before = (text(session), session.clickables, session.page, dict(session.options), session.reward)
    for action in (
        *("", "click", "search", "click[]", "search[]", "buy now", "click[search]", "click[attributes]", "think[hm]"),
        *("click[no such thing]", "Click[back to search]", "click[back to search", "click[red ]", "click[a [b] c]"),
    ):
        session.step(action)
        assert (text(session), session.clickables, session.page, session.options, session.reward) == before
    assert text(play(*place, "click[back to search]")) == "Search"
    assert text(play(*place, "search[tea mug]")) == text(play("search[tea mug]"))


def test_odd_products():
    session = play(*MUG)
    assert text(session) == (
        "Back to Search [SEP] < Prev [SEP] style [SEP] features [SEP] search [SEP] next > [SEP] a [b] c [SEP] red"
        " [SEP] color [SEP] red [SEP]  [SEP] none [SEP] Tea Mug [SEP] Price: $12.0 to $15.5 [SEP] Rating: N.A. [SEP] "
        "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    for value in ("search", "a [b] c"):  # clicks that the reference does not take
        session.step(f"click[{value}]")
    assert session.options == {}
    session.step("click[next >]")
    session.step("click[red]")  # of both options of that value the last
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


PAST = [("'Search'", "fly"), ("'Search'", "search[tea mug]"), ("'Back to Search' [SEP] 'B0'", "click[b0oddasin9]")]


def test_paper_later_turn_has_the_last_two_numbered_from_one():
    assert PaperStyle(think=False).prompt(play(SHIRTS, FIRST, "click[reviews]"), PAST) == (
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
    style, session = PaperStyle(), play()
    rest = len(style.prompt(session, [("", "x")]))
    past = [("y" * (13_000 - rest), "x")]
    assert len(style.prompt(session, past)) == 13_000
    assert style.prompt(session, [("y" + past[0][0], "x")]) == style.prompt(session, [])
    assert PaperStyle(history=0).prompt(session, PAST) == style.prompt(session, [])


def test_paper_projection():
    """What it shares with ALFWorld's is tested there."""
    response = "<think>a</think> <ACTION> Click[buy now] </action> b <action>c</action>"
    assert PaperStyle().parse_action(response, {}) == ("click[buy now]", True)
    unparsed = "<think>a</think>I would like to CLICK[buy now]"
    assert PaperStyle().parse_action(unparsed, {}) == ("ke to click[buy now]", False)
    assert PaperStyle().format_action("click[red]") == "<think>I should click[red].</think><action>click[red]</action>"


COMPACT = CompactStyle(history=1)
COMPACT_TASK = "task:\nsearch men'sShirts\nwith cotton\npick red\npick large\n"


def test_compact_prompts():
    see = f"{COMPACT_TASK}did:\nb\nsee:\n"
    start = COMPACT.prompt(play(), [])
    assert start == f"{COMPACT_TASK}see:\nshop\ncan:\nsearch men'sShirts\nsearch mugs"
    brief = "cotton machineWash"
    mug = play("search[tea mug]")
    assert COMPACT.prompt(mug, [("", "a"), ("", "b")]) == f"{see}page 1\na: {brief}\ncan:\nopen a\nnext\nleave"
    chosen = play(SHIRTS, FIRST, "click[navy blue]")
    assert COMPACT.prompt(chosen, [("", "b")]) == (
        f"{see}product: {brief}\ncolor: red navyBlue\nsize: small large\nchosen: navyBlue\n"
        "can:\npick red\npick navyBlue\npick small\npick large\nbuy\nprevious\nleave"
    )
    dear = Session(Catalogue([shirt(1, price=20.01)], [GOAL], "", "rules"), GOAL)
    dear.step(SHIRTS)
    assert COMPACT.observation(dear) == f"page 1\na: {brief} dear"


def test_compact_actions_are_those_of_the_session():
    item = play(SHIRTS, FIRST)
    assert COMPACT.actions(play())["search mugs"] == "search[mugs]"
    assert COMPACT.actions(play())["search men'sShirts"].startswith("search[men's shirts men's shirt button down")
    assert COMPACT.actions(item)["pick navyBlue"] == "click[navy blue]"
    assert COMPACT.actions(item)["buy"] == "click[buy now]"
    assert list(COMPACT.actions(play(SHIRTS, "click[next >]")))[2:] == ["next", "previous", "leave"]
    for session in (play(), play(SHIRTS), item):
        actions = COMPACT.actions(session)
        for name in actions:
            assert COMPACT.parse_action(COMPACT.format_action(name), actions) == (name, True)
        assert COMPACT.parse_action("\nopen z", actions) == ("open z", False)
