"""WebShop's pages and prompts letter by letter, and what each action does on each of them."""

import random

import pytest

from paw.envs.webshop import pages
from paw.envs.webshop.catalogue import Catalogue
from paw.envs.webshop.prompt import CompactStyle, PaperStyle, make_style
from paw.envs.webshop.session import Session
from paw.envs.webshop.types import Goal, Product

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


GOAL = Goal(
    asin="B000000000",
    category="fashion",
    query="men's shirts",
    name="Plain Shirt 0",
    product_category="Clothing › Men › Shirts",
    instruction=TASK,
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
    options={"style": ("features", "search", "next >", "a [b] c", "red"), "color": ("red", "  "), "none": ()},
)
SHOP = Catalogue([*(shirt(i) for i in range(12)), ODD], [GOAL], "digest", "rules")


def play(*actions: str, **options) -> Session:
    session = Session(SHOP, GOAL, **options)
    for action in actions:
        session.step(action)
    return session


SHIRTS, FIRST, MUG = "search[plain shirt]", "click[b000000000]", ("search[tea mug]", "click[b0oddasin9]")
HEAD = f"Instruction: [SEP] {TASK} [SEP] Back to Search"


def test_search_page():
    session = play()
    assert session.text == f"WebShop [SEP] Instruction: [SEP] {TASK} [SEP] Search"
    assert session.available() == ["search[<your query>]", "click[search]"]


def test_results_pages():
    session = play(SHIRTS)
    order = [product.asin for product in session.hits]
    items = [f"{asin} [SEP] Plain Shirt {int(asin[1:])} [SEP] $12.0 to $15.5" for asin in order]
    assert len(order) == 12
    assert session.text == " [SEP] ".join([HEAD, "Page 1 (Total results: 12)", "Next >", *items[:10]])
    links = [f"click[{asin.lower()}]" for asin in order]
    assert session.available() == ["click[back to search]", "click[next >]", *links[:10]]
    session.step("click[next >]")
    assert session.text == " [SEP] ".join([HEAD, "Page 2 (Total results: 12)", "< Prev", "Next >", *items[10:]])
    assert session.available() == ["click[back to search]", "click[< prev]", "click[next >]", *links[10:]]
    session.step("click[next >]")
    session.step("click[next >]")
    assert session.text == f"{HEAD} [SEP] Page 4 (Total results: 12) [SEP] < Prev [SEP] Next >"
    for page in (3, 2, 1):
        session.step("click[< prev]")
        assert session.page == page
    session.step("click[< prev]")
    assert session.page == 1


def test_a_search_that_finds_nothing():
    assert play("search[zebra]").text == f"{HEAD} [SEP] Page 1 (Total results: 0) [SEP] Next >"


def test_item_page_does_not_show_what_is_chosen():
    text = (
        f"{HEAD} [SEP] < Prev [SEP] color [SEP] red [SEP] navy blue [SEP] size [SEP] small [SEP] large [SEP] "
        "Plain Shirt 0 [SEP] Price: $12.0 to $15.5 [SEP] Rating: N.A. [SEP] "
        "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    session = play(SHIRTS, FIRST)
    assert session.text == text
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert session.clickables == [*buttons, "red", "navy blue", "small", "large"]
    session.step("click[red]")
    session.step("click[Navy Blue]")
    session.step("click[large]")
    assert session.text == text
    assert session.options == {"color": "navy blue", "size": "large"}


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("description", " [SEP] A shirt, number 0."),
        ("features", " [SEP] Cotton: soft. [SEP] Washable."),
        ("reviews", ""),
        (
            "attributes",
            " [SEP] cotton [SEP] machine wash [SEP] fashion [SEP] men's shirts [SEP] Clothing › Men › Shirts",
        ),
    ],
)
def test_sub_pages_and_back_with_the_options_kept(name, rest):
    session = play(SHIRTS, FIRST, "click[red]", show_attributes=True)
    before = session.text
    assert "Reviews [SEP] Attributes [SEP] Buy Now" in before
    session.step(f"click[{name}]")
    assert session.text == f"{HEAD} [SEP] < Prev{rest}"
    assert session.available() == ["click[back to search]", "click[< prev]"]
    session.step("click[buy now]")
    assert session.reward is None and session.sub_page == name
    session.step("click[< prev]")
    assert (session.text, session.options) == (before, {"color": "red"})


def test_back_to_results_forgets_the_options():
    session = play(SHIRTS, "click[next >]", "search[plain shirt 0]", FIRST, "click[red]", "click[< prev]")
    assert (session.page, session.product, session.options) == (1, None, {})


@pytest.mark.parametrize("actions", [(SHIRTS,), (SHIRTS, FIRST), (SHIRTS, FIRST, "click[features]")])
def test_back_to_search_and_a_search_work_on_every_page(actions):
    assert play(*actions, "click[back to search]").text == play().text
    assert play(*actions, "search[TEA mug]").text == play("search[tea mug]").text


def test_the_purchase_ends_with_the_reward_and_its_page():
    session = play(SHIRTS, FIRST, "click[large]", "click[red]", "click[buy now]")
    assert (session.reward, session.available()) == (1.0, [])
    assert session.text == (
        "Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk interface.) [SEP] "
        "Purchased [SEP] asin [SEP] B000000000 [SEP] options [SEP] "
        '{"color": "red", "size": "large"} [SEP] attrs [SEP] None [SEP] category [SEP] None [SEP] query [SEP] None'
        " [SEP] product category [SEP] None [SEP] Target [SEP] asin [SEP] options [SEP] attrs [SEP] price upper [SEP] "
        "instuction text [SEP] category [SEP] product category [SEP] query [SEP] Goal [SEP] None [SEP] Reward [SEP] "
        "Your score (min 0.0, max 1.0) [SEP] 1.0 [SEP] Reward Details [SEP] None"
    )
    assert play(SHIRTS, FIRST, "click[red]", "click[buy now]").reward == 0.75
    with pytest.raises(AssertionError):
        session.step("click[buy now]")


@pytest.mark.parametrize("place", [(), (SHIRTS,), (SHIRTS, FIRST, "click[red]"), (SHIRTS, FIRST, "click[reviews]")])
@pytest.mark.parametrize(
    "action",
    [
        *("", "click", "search", "click[]", "search[]", "buy now", "click[search]", "click[attributes]", "think[hm]"),
        *("click[no such thing]", "Click[back to search]", "click[back to search", "click[red ]", "click[a [b] c]"),
    ],
)
def test_illegal_actions_do_nothing(place, action):
    session = play(*place)
    before = (session.text, session.clickables, session.page, dict(session.options), session.reward)
    session.step(action)
    assert (session.text, session.clickables, session.page, session.options, session.reward) == before


def test_text_after_the_bracket_is_ignored_as_in_the_reference():
    assert play("search[tea mug] now").text == play("search[tea mug]").text


def test_odd_products():
    session = play(*MUG)
    assert session.text == (
        f"{HEAD} [SEP] < Prev [SEP] style [SEP] features [SEP] search [SEP] next > [SEP] a [b] c [SEP] red [SEP] "
        "color [SEP] red [SEP]  [SEP] none [SEP] Tea Mug [SEP] Price: $12.0 to $15.5 [SEP] Rating: N.A. [SEP] "
        "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    for value in ("search", "a [b] c"):  # clicks that the reference does not take
        session.step(f"click[{value}]")
    assert session.options == {}
    session.step("click[next >]")
    session.step("click[red]")  # of both options of that value the last
    assert session.options == {"style": "next >", "color": "red"}
    session.step("click[features]")  # the sub-page, not the option
    assert session.text == f"{HEAD} [SEP] < Prev [SEP]  [SEP] two\nlines"
    assert pages.sub_page(TASK, ODD, "Description") == ["Instruction:", TASK, "Back to Search", "< Prev"]


def test_128_sessions_over_one_catalogue_do_not_influence_each_other():
    def choose(session: Session, rng: random.Random) -> str:
        legal = [f"click[{text}]" for text in session.clickables if text != "buy now"]
        return rng.choice([*legal, "search[plain shirt]", "search[mug]"])

    def run(together: bool) -> list[list[str]]:
        sessions = [(Session(SHOP, GOAL), random.Random(i), []) for i in range(128)]
        turns = (
            [one for _ in range(12) for one in sessions] if together else [one for one in sessions for _ in range(12)]
        )
        for session, rng, seen in turns:
            session.step(choose(session, rng))
            seen.append(f"{session.text} {session.options}")
        return [seen for _, _, seen in sessions]

    assert run(together=True) == run(together=False)


# ---- prompts


def test_paper_first_turn():
    assert PaperStyle().prompt(play(), []) == (
        "\n"
        "You are an expert autonomous agent operating in the WebShop e‑commerce environment. \n"
        f"Your task is to: {TASK}.\n"
        "Your current observation is: 'Search'.\n"
        "Your admissible actions of the current situation are: \n"
        "[\n"
        "'search[<your query>]',\n"
        "'click[search]',\n"
        "].\n"
        "\n"
        "Now it's your turn to take one action for the current step.\n"
        "You should first reason step-by-step about the current situation, then think carefully which admissible "
        "action best advances the shopping goal. This reasoning process MUST be enclosed within <think> </think> "
        "tags. \n"
        "Once you've finished your reasoning, you should choose an admissible action for current step and present it "
        "within <action> </action> tags.\n"
    )


PAST = [("'Search'", "fly"), ("'Search'", "search[tea mug]"), ("'Back to Search' [SEP] 'B0'", "click[b0oddasin9]")]


def test_paper_later_turn_has_the_last_two_numbered_from_one():
    assert PaperStyle(think=False).prompt(play(SHIRTS, FIRST, "click[reviews]"), PAST) == (
        "\n"
        "You are an expert autonomous agent operating in the WebShop e‑commerce environment.\n"
        f"Your task is to: {TASK}.\n"
        "Prior to this step, you have already taken 3 step(s). Below are the most recent 2 observations and the "
        "corresponding actions you took: [Observation 2: ''Search'', Action 2: 'search[tea mug]']\n"
        "[Observation 3: ''Back to Search' [SEP] 'B0'', Action 3: 'click[b0oddasin9]']\n"
        "You are now at step 4 and your current observation is: 'Back to Search' [SEP] '< Prev'.\n"
        "Your admissible actions of the current situation are: \n"
        "[\n"
        "'click[back to search]',\n"
        "'click[< prev]',\n"
        "].\n"
        "\n"
        "Now it's your turn to take one action for the current step.\n"
        "You should choose an admissible action for current step and present it within <action> </action> tags.\n"
    )


def test_a_paper_prompt_that_gets_too_long_has_no_history():
    style, session = PaperStyle(), play()
    rest = len(style.prompt(session, [("", "x")]))
    past = [("y" * (13_000 - rest), "x")]
    assert len(style.prompt(session, past)) == 13_000
    assert style.prompt(session, [("y" + past[0][0], "x")]) == style.prompt(session, [])
    assert PaperStyle(history=0).prompt(session, PAST) == style.prompt(session, [])


@pytest.mark.parametrize(
    ("response", "action", "valid"),
    [
        ("<think>a</think><action>search[Red Shirt]</action>", "search[red shirt]", True),
        ("<think>a</think> <ACTION> click[buy now] </action> b <action>c</action>", "click[buy now]", True),
        ("<think>a</think><action>fly</action>", "fly", True),
        ("<action>click[red]</action>", "click[red]", False),
        ("<THINK>a</THINK><action>click[red]</action>", "click[red]", False),
        ("<think>买</think><action>click[red]</action>", "click[red]", False),
        ("<think>a</think>I would like to CLICK[buy now]", "ke to click[buy now]", False),
        ("<think>a</think><action>click[red]", "k><action>click[red]", False),
        ("", "", False),
    ],
)
def test_paper_projection(response, action, valid):
    assert PaperStyle().parse_action(response, {}) == (action, valid)


def test_paper_answers_are_well_formed():
    for think in (True, False):
        style = PaperStyle(think=think)
        assert style.parse_action(style.format_action("click[red]"), {}) == ("click[red]", True)
    assert PaperStyle(think=False).parse_action("<action>click[red]</action>", {}) == ("click[red]", True)


COMPACT = make_style("compact", history=1, think=True)
COMPACT_TASK = "task:\nsearch men'sShirts\nwith cotton\npick red\npick large\n"


def test_compact_prompts():
    assert isinstance(COMPACT, CompactStyle)
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


def test_a_style_that_does_not_exist():
    with pytest.raises(ValueError, match="'chatty'"):
        make_style("chatty", history=2, think=True)
