"""WebShop's files, goals and search with a shop of four products. Also the generated shop, its
tasks and episodes."""

import hashlib
import json
import math
import random
import sys
from pathlib import Path

import pytest

from paw.config.recipe import load as load_recipe
from paw.envs import make_factory
from paw.envs.base import admissible_responses, eval_tasks, train_tasks, warmup_tasks
from paw.envs.settings import WebshopConfig
from paw.envs.webshop import catalogue, generator
from paw.envs.webshop.catalogue import ENTRIES, HUMAN, ITEMS, generated, load
from paw.envs.webshop.factory import WebshopFactory
from paw.envs.webshop.reward import base_colour, reward
from paw.errors import UserError

RULES = WebshopConfig(nouns="rules")
PEOPLE = WebshopConfig(goals="human", nouns="rules")


def item(asin: str, name: str, **others) -> dict:
    classification = {
        "category": "beauty",
        "query": " Shampoo ",
        "product_category": "Beauty › Hair › Shampoo",
    }
    texts = {
        "full_description": "Made by hand.",
        "small_description": ["Sulfate free", "Smells good"],
    }
    return {
        "asin": asin,
        "name": name,
        **classification,
        **texts,
        "pricing": "$12.99",
        "customization_options": {},
        **others,
    }


SIZES = [{"value": " 8 OZ "}, {"value": "12 oz"}]
SCENTS = [{"value": "Lavender/Mint", "image": "x"}, {"value": "Citrus"}]
SHOP = [
    item(
        "B000000001",
        "Lumo Tree Shampoo",
        customization_options={"Size": SIZES, "Scent": SCENTS, "Style": None},
    ),
    item(
        "B000000002",
        "Vero Slim Shirt",
        pricing="$10.00 - $30.50",
        customization_options=None,
        query="men's shirts",
    ),
    {"asin": "nan"},
    item("B0000000055", "Skipped"),
    item("B000000001", "Skipped: seen before"),
    item("b000000003", "Old Lamp", pricing="", full_description=None, small_description="Brass"),
    item("B000000004", "Grand Sofa", pricing="$985", small_description=[]),
]


def entry(instruction: str | None, *wanted: str, attributes: tuple[str, ...] = ()) -> dict:
    return {
        "attributes": [*attributes],
        "instruction": instruction,
        "instruction_attributes": [*wanted],
    }


ATTRIBUTES = {
    "B000000001": entry(
        "Find me sulfate free shampoo", "sulfate free", attributes=("tea tree", "sulfate free")
    ),
    "B000000002": entry("Find me a shirt", "slim fit"),
    "b000000003": {"instruction": None},
    "B000000004": entry("Find me a sofa", "soft"),
}


def written(instruction: str, attributes: list[str], *options: str) -> dict:
    return {
        "instruction": instruction,
        "instruction_attributes": attributes,
        "instruction_options": [*options],
    }


WRITTEN = {
    "B000000001": [
        written("i need a shampoo.", ["tea tree"], "citrus", "8 oz"),
        written("anything", []),
    ],
    "B000000004": [written("a sofa", ["soft"])],
}


def shop(folder: Path, **changed) -> Path:
    for name, content in ((ITEMS, SHOP), (ENTRIES, ATTRIBUTES), (HUMAN, WRITTEN)):
        content = changed.get(name.split(".")[0], content)
        file_text = content if isinstance(content, str) else json.dumps(content, indent=1)
        if content is not None:
            (folder / name).write_text(file_text, "utf-8", errors="surrogateescape")
    return folder


FIND = "Find me sulfate free shampoo with scent: "
LIMIT = ", and price lower than 40.00 dollars"
MINT = "lavender | mint"
CITRUS = "citrus"
# as the reference makes them: its generator is seeded with 233 before the prices and before the
# shuffle
GOALS = [
    (f"{FIND}citrus, and size: 8 oz{LIMIT}", {"scent": CITRUS, "size": "8 oz"}, 40.0),
    (f"{FIND}lavender | mint, and size: 8 oz{LIMIT}", {"scent": MINT, "size": "8 oz"}, 40.0),
    (f"{FIND}citrus, and size: 12 oz{LIMIT}", {"scent": CITRUS, "size": "12 oz"}, 40.0),
    ("Find me a shirt, and price lower than 60.00 dollars", {}, 60.0),
    (f"{FIND}lavender | mint, and size: 12 oz{LIMIT}", {"scent": MINT, "size": "12 oz"}, 40.0),
    ("Find me a sofa", {}, math.inf),
]
HUMAN_GOALS = [
    ("a sofa", ("soft",), {}, math.inf),
    (
        "i need a shampoo, and price lower than 40.00 dollars",
        ("tea tree",),
        {"0": "citrus", "1": "8 oz"},
        40.0,
    ),
]


def test_products_goals_and_search(tmp_path: Path):
    shop_of_four = load(shop(tmp_path), RULES)
    first, second, third, fourth = shop_of_four.products
    assert list(shop_of_four.by_asin) == ["b000000001", "b000000002", "b000000003", "b000000004"]
    assert first.options == {"size": ("8 oz", "12 oz"), "scent": ("lavender | mint", "citrus")}
    assert first.query == "shampoo"
    assert first.category == "beauty"
    assert first.attributes == ("tea tree", "sulfate free")
    assert first.price_text == "$12.99"
    assert first.price == 12.99
    assert second.price_text == "$10.0 to $30.5"
    assert second.price == random.Random(233).uniform(10.0, 30.5)
    assert third.price_text == "$100.0"
    assert third.price == 100.0
    assert third.description == ""
    assert third.bullets == ("Brass",)
    assert second.options == {}
    assert third.attributes == ()
    assert fourth.bullets == ()
    assert [
        (goal.instruction, goal.options, goal.price_upper) for goal in shop_of_four.goals
    ] == GOALS
    assert shop_of_four.goals[0].product == first
    assert shop_of_four.goals[0].attributes == ("sulfate free",)
    assert shop_of_four.n_test == 1
    assert [product.title for product in shop_of_four.search("LAMPS, shampoos")] == [
        "Old Lamp",
        "Lumo Tree Shampoo",
    ]
    assert shop_of_four.search("lavender") == [first]  # the value of an option
    # The second bullet is not indexed.
    assert shop_of_four.search("good") == [] == shop_of_four.search("the")
    file_bytes = (tmp_path / ENTRIES).read_bytes() + (tmp_path / ITEMS).read_bytes()
    assert shop_of_four.digest == hashlib.sha256(file_bytes).hexdigest()
    people = load(tmp_path, PEOPLE).goals
    assert [
        (goal.instruction, goal.attributes, goal.options, goal.price_upper) for goal in people
    ] == HUMAN_GOALS
    (tmp_path / HUMAN).unlink()
    for name in (ITEMS, ENTRIES):
        (tmp_path / name).rename(tmp_path / name.replace("_1000", ""))
    assert (
        load(tmp_path, WebshopConfig(catalogue="full", nouns="rules")).products
        == shop_of_four.products
    )


def second_item(**changes) -> dict:
    return {
        "items_shuffle_1000": [
            SHOP[0],
            {key: value for key, value in {**SHOP[1], **changes}.items() if value is not Ellipsis},
        ]
    }


SECOND = f"{ITEMS}, product 2 (B000000002): "


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"items_shuffle_1000": '{"a": 1}'},
            f"{ITEMS}: broken or cut short in product 1 (no array)",
        ),
        (
            {"items_shuffle_1000": '[{"asin": "' + "B" * 10_000},
            "cut short in product 1 (Unterminated string",
        ),
        (second_item(query=...), f"{SECOND}query: Field required"),
        (second_item(name=5), f"{SECOND}name: Input should be a valid string, not 5"),
        (
            second_item(customization_options=["S"]),
            f"{SECOND}customization_options: should be like {{name: [{{'value",
        ),
        (second_item(pricing="free"), f"{SECOND}pricing: should be like '$12.99', not 'free'"),
        (
            {"items_shuffle_1000": []},
            f"{ITEMS}: 0 products make 0 goals with env.goals = 'synthetic'",
        ),
        (
            {"items_ins_v2_1000": '{\n"B1": '},
            f"{ENTRIES}, line 2: broken or cut short (Expecting value)",
        ),
        (
            {"items_ins_v2_1000": {}},
            f"{ENTRIES} has no 'B000000001': it belongs to another products file",
        ),
        (
            {"items_ins_v2_1000": {"B000000001": entry("x")}},
            "B000000001: an instruction without 'instruction_attrib",
        ),
        (
            {"items_human_ins": {"B000000001": [{"instruction": "x"}]}},
            "1: instruction_attributes: Field required",
        ),
        ({"items_human_ins": {}}, "4 products make 0 goals with env.goals = 'human'"),
        ({"items_human_ins": None}, f"{HUMAN} is missing (env.data with env.catalogue = 'small'"),
        (
            {"items_shuffle_1000": None},
            f"{ITEMS} is missing (env.data with env.catalogue = 'small'",
        ),
        (
            {"items_ins_v2_1000": None},
            f"{ENTRIES} is missing (env.data with env.catalogue = 'small'",
        ),
        ({"items_shuffle_1000": '[{"asin": "fr\udcff"}]'}, f"{ITEMS}: not UTF-8"),
        ({"items_ins_v2_1000": '{"B1": "fr\udcff"}'}, f"{ENTRIES}: not UTF-8"),
    ],
)
def test_damage_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict, message: str
):
    monkeypatch.setattr(catalogue, "CHUNK", 64)
    monkeypatch.setattr(catalogue, "LARGEST", 4096)
    with pytest.raises(UserError) as caught:
        load(shop(tmp_path, **changed), PEOPLE if "items_human_ins" in changed else RULES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rapidfuzz_is_missed_before_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(UserError, match="needs rapidfuzz: pip install 'paw-trainer"):
        load(tmp_path, RULES)


def test_an_array_is_read_piece_by_piece_and_a_cut_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "array.json"
    values = [{}, {"a, ]": 'ü"\\', "b": [1.5, None]}, {"c": {"d": [[]]}}, {}]
    for chunk_bytes in (4, 7, 40):
        monkeypatch.setattr(catalogue, "CHUNK", chunk_bytes)
        text = json.dumps(values, indent=chunk_bytes % 3 or None, ensure_ascii=chunk_bytes % 2 == 0)
        path.write_text(text, "utf-8")
        digest = hashlib.sha256()
        assert list(catalogue.read_array(path, digest)) == values
        assert digest.digest() == hashlib.sha256(path.read_bytes()).digest()
        for length in range(len(text)):
            path.write_text(text[:length], "utf-8")
            with pytest.raises(UserError, match="cut short in product"):
                list(catalogue.read_array(path, hashlib.sha256()))


def test_the_generated_shop_is_a_function_of_its_seed_and_its_goals_can_be_met(tmp_path: Path):
    assert generator.records(50, 3) == generator.records(50, 3) != generator.records(50, 4)
    synthetic = generated(600, "synthetic", "rules")
    assert len(synthetic.products) == 600
    assert len(synthetic.by_asin) == 600
    assert synthetic.n_test == 500
    assert len(synthetic.goals) > 2000
    assert {product.category for product in synthetic.products} == set(generator.SHOP["roots"])
    assert {product.query for product in synthetic.products} == {
        sold.query for sold in generator.WARES
    }
    assert 0.05 < sum(not product.options for product in synthetic.products) / 600 < 0.3
    generator.write(tmp_path, 120)
    for config in (RULES, PEOPLE):
        from_files = load(tmp_path, config)
        direct = generated(120, config.goals, "rules")
        assert from_files.products == direct.products
        assert from_files.goals == direct.goals
    for goal in (*synthetic.goals[:1000], *direct.goals):
        assert all(
            wanted in goal.instruction for wanted in (*goal.attributes, *goal.options.values())
        )
        assert reward(goal.product, goal, goal.options, "rules") == 1.0
        assert goal.product.price < goal.price_upper or goal.price_upper == math.inf
    for name, values in generator.OPTIONS.values():  # the reward distinguishes these values
        assert all({*base_colour(value).split()} <= {*value.split()} for value in values)
        assert name != "color" or len({base_colour(value) for value in values}) == len(values)


# ---- tasks and episodes


def factory(**settings) -> WebshopFactory:
    return WebshopFactory(
        WebshopConfig(**{"eval_split": "test", "max_turns": 15, "products": 200, **settings})
    )


def episode(environment, task, respond=lambda environment: environment.oracle()) -> list:
    environment.reset(task)
    outcomes = []
    while not outcomes or not outcomes[-1].done:
        outcomes.append(environment.step(respond(environment)))
    return outcomes


@pytest.mark.parametrize("style", ["paper", "compact"])
@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_the_buyer_buys_what_is_wanted_and_random_play_does_not(style, goals):
    shop = factory(style=style, goals=goals)
    rng = random.Random(0)

    def at_random(environment) -> str:
        """Return a random action that has an effect, or a search for the task's product."""
        query = environment.format_action(f"search[{environment.session.goal.product.query}]")
        return rng.choice(admissible_responses(environment) or [query])

    environment = shop.make()
    tasks = eval_tasks(shop, "test", 60, 0)
    for task in tasks:
        final_outcome = episode(environment, task)[-1]
        assert final_outcome.won
        assert final_outcome.score == 1
    random_ends = [episode(environment, task, at_random)[-1] for task in tasks]
    assert sum(outcome.won for outcome in random_ends) <= 3
    assert sum(outcome.score for outcome in random_ends) < 18


def test_tasks_are_pure_and_splits_share_no_goal():
    shop = factory()
    assert train_tasks(shop, 3, 4, seed=1) == train_tasks(factory(), 3, 4, seed=1)
    goal_count = len(shop.catalogue.goals)
    train_ids = {task.id for task in train_tasks(shop, 0, goal_count, 0)}
    held_out = eval_tasks(shop, "test", 0, 0)
    # Tasks are drawn with replacement.
    assert len({task.id for task in eval_tasks(shop, "test", 400, 5)}) < 400
    test_ids = {task.id for task in held_out}
    assert len(train_ids) + len(test_ids) == goal_count == len(train_ids | test_ids)
    assert test_ids == {f"goal/{number}" for number in range(shop.catalogue.n_test)}
    assert {task.kind for task in held_out} == set(generator.SHOP["roots"])


def test_the_warm_up_visits_shops_of_its_own():
    shop = factory(products=60, style="compact")
    tasks = warmup_tasks(shop, 0, 130, 0)
    assert len({task.id for task in tasks} | {warmup_tasks(shop, 0, 1, 1)[0].id}) == 131
    assert {task.payload.shop for task in tasks} == {1, 2, 3}
    assert all(
        task.payload.goal.product.asin.lower() not in shop.catalogue.by_asin for task in tasks
    )
    environment = shop.make()
    for task in (*tasks[60:66], *train_tasks(shop, 0, 2, 0)):
        assert episode(environment, task)[-1].won


def test_outcomes_of_an_episode():
    shop = factory(reward=10.0)
    environment = shop.make()
    (task,) = eval_tasks(shop, "test", 1, 0)
    *turns, purchase = episode(environment, task)
    assert purchase.reward == 10.0
    assert purchase.done is True
    assert purchase.won is True
    assert purchase.score == 1.0
    assert purchase.observation == ""
    assert purchase.action == "click[buy now]"
    for turn in turns:
        assert turn.reward == 0.0
        assert not turn.done
        assert not turn.won
        assert turn.score == 0.0
    assert environment.reset(task) == "'Search'"
    assert environment.task == task.payload.goal.instruction
    assert environment.admissible_actions() == []
    outcome = environment.step(environment.oracle())
    assert outcome.observation.startswith("'Back to Search' [SEP] 'Page 1")
    assert outcome.valid
    assert outcome.action == f"search[{task.payload.goal.product.query}]"
    assert environment.admissible_actions()[:2] == ["click[back to search]", "click[next >]"]
    environment.step(environment.format_action(environment.admissible_actions()[2]))
    partly = environment.step(environment.format_action("click[buy now]"))
    assert 0 < partly.score < 1
    assert partly.reward == 0
    assert partly.done
    assert not partly.won
    outcomes = episode(factory(max_turns=3).make(), task, lambda environment: "no tags")
    assert [
        (outcome_of_turn.done, outcome_of_turn.valid, outcome_of_turn.score)
        for outcome_of_turn in outcomes
    ] == [
        (False, False, 0),
        (False, False, 0),
        (True, False, 0),
    ]


def test_no_other_splits_and_fingerprints_tell_catalogues_apart(tmp_path):
    for key, split in (("eval_split", "valid_unseen"), ("train_split", "test")):
        with pytest.raises(UserError, match=f"env.{key} = '{split}'"):
            factory(**{key: split})
    with pytest.raises(UserError, match=r"env\.eval_split = 'dev'"):
        eval_tasks(factory(), "dev", 1, 0)
    generator.write(tmp_path, products=60)
    changes = [{}, {"goals": "human"}, {"products": 60}, {"data": tmp_path}]
    assert len({factory(**change).fingerprint() for change in changes}) == 4
    assert factory().fingerprint() == factory().fingerprint()


def test_the_recipe_is_small_enough_for_its_model():
    shop = make_factory(load_recipe("webshop-quickstart"))
    environment = shop.make()
    responses = set()
    longest_prompt = 0
    for task in warmup_tasks(shop, 0, 150, 0):
        environment.reset(task)
        is_done = False
        while not is_done:
            responses.update(admissible_responses(environment))
            longest_prompt = max(longest_prompt, len(environment.context().split()))
            is_done = environment.step(environment.oracle()).done
    assert len(responses) < 300
    assert longest_prompt < 200
