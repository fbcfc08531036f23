"""WebShop's files, goals and search on a shop of four products; the generated shop."""

import dataclasses
import hashlib
import json
import math
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paw.envs.settings import WebshopConfig
from paw.envs.webshop import files, generator
from paw.envs.webshop.catalogue import Catalogue, generated, load
from paw.envs.webshop.goals import synthetic_goals
from paw.envs.webshop.reward import base_colour, reward
from paw.envs.webshop.wares import OPTIONS, ROOTS, WARES
from paw.errors import UserError

ITEMS, ENTRIES, HUMAN = "items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json"
RULES = WebshopConfig(nouns="rules")


def item(asin: str, name: str, **others) -> dict:
    return {
        "asin": asin,
        "name": name,
        "category": "beauty",
        "query": " Shampoo ",
        "product_category": "Beauty › Hair › Shampoo",
        "full_description": "Made by hand.",
        "small_description": ["Sulfate free", "Smells good"],
        "pricing": "$12.99",
        "customization_options": {},
        **others,
    }


SHOP = [
    item(
        "B000000001",
        "Lumo Tea Tree Shampoo",
        customization_options={
            "Size": [{"value": " 8 OZ "}, {"value": "12 oz"}],
            "Scent": [{"value": "Lavender/Mint", "image": "x"}, {"value": "Citrus"}],
            "Style": None,
        },
    ),
    item("B000000002", "Vero Slim Shirt", pricing="$10.00 - $30.50", customization_options=None, query="men's shirts"),
    item("nan", "Skipped"),
    item("B0000000055", "Skipped"),
    item("B000000001", "Skipped: seen before"),
    item("b000000003", "Old Lamp", pricing="", full_description=None, small_description="Brass"),
    item("B000000004", "Grand Sofa", pricing="$985", small_description=[]),
]
ATTRIBUTES = {
    "B000000001": {
        "attributes": ["tea tree", "sulfate free"],
        "instruction": "Find me sulfate free shampoo",
        "instruction_attributes": ["sulfate free"],
    },
    "B000000002": {
        "attributes": ["slim fit"],
        "instruction": "Find me a shirt",
        "instruction_attributes": ["slim fit"],
    },
    "b000000003": {"instruction": None},
    "B000000004": {"attributes": ["soft"], "instruction": "Find me a sofa", "instruction_attributes": ["soft"]},
}
WRITTEN = {
    "B000000001": [
        {
            "instruction": "i need a shampoo.",
            "instruction_attributes": ["tea tree"],
            "instruction_options": ["citrus", "8 oz"],
        },
        {"instruction": "anything", "instruction_attributes": [], "instruction_options": []},
    ],
    "B000000004": [{"instruction": "a sofa", "instruction_attributes": ["soft"], "instruction_options": []}],
}


def shop(folder: Path, **changed) -> Path:
    for name, content in ((ITEMS, SHOP), (ENTRIES, ATTRIBUTES), (HUMAN, WRITTEN)):
        content = changed.get(name.split(".")[0], content)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content, indent=1), "utf-8")
    return folder


FIND, LIMIT = "Find me sulfate free shampoo with scent: ", ", and price lower than 40.00 dollars"
GOALS = [  # as the reference makes them, its generator seeded with 233 before the prices and before the shuffle
    ("B000000001", f"{FIND}citrus, and size: 8 oz{LIMIT}", {"scent": "citrus", "size": "8 oz"}, 40.0),
    ("B000000001", f"{FIND}lavender | mint, and size: 8 oz{LIMIT}", {"scent": "lavender | mint", "size": "8 oz"}, 40.0),
    ("B000000001", f"{FIND}citrus, and size: 12 oz{LIMIT}", {"scent": "citrus", "size": "12 oz"}, 40.0),
    ("B000000002", "Find me a shirt, and price lower than 60.00 dollars", {}, 60.0),
    (
        "B000000001",
        f"{FIND}lavender | mint, and size: 12 oz{LIMIT}",
        {"scent": "lavender | mint", "size": "12 oz"},
        40.0,
    ),
    ("B000000004", "Find me a sofa", {}, math.inf),
]
HUMAN_GOALS = [
    ("a sofa", ("soft",), {}, math.inf),
    ("i need a shampoo, and price lower than 40.00 dollars", ("tea tree",), {"0": "citrus", "1": "8 oz"}, 40.0),
]


@pytest.fixture
def tiny(tmp_path: Path) -> Catalogue:
    return load(shop(tmp_path), RULES)


def test_products_are_cleaned(tiny: Catalogue):
    first, second, third, fourth = tiny.products
    assert [product.asin for product in tiny.products] == ["B000000001", "B000000002", "b000000003", "B000000004"]
    assert first.options == {"size": ("8 oz", "12 oz"), "scent": ("lavender | mint", "citrus")}
    assert (first.query, first.category, first.attributes) == ("shampoo", "beauty", ("tea tree", "sulfate free"))
    assert (first.price_text, first.price) == ("$12.99", 12.99)
    assert second.options == {}
    assert (second.price_text, second.price) == ("$10.0 to $30.5", random.Random(233).uniform(10.0, 30.5))
    assert (third.price_text, third.price, third.description, third.bullets) == ("$100.0", 100.0, "", ("Brass",))
    assert (third.attributes, fourth.bullets) == ((), ())
    assert list(tiny.by_asin) == ["b000000001", "b000000002", "b000000003", "b000000004"]


def test_synthetic_goals_are_every_combination(tiny: Catalogue):
    assert [(goal.asin, goal.instruction, goal.options, goal.price_upper) for goal in tiny.goals] == GOALS
    assert {goal.attributes for goal in tiny.goals if goal.asin == "B000000001"} == {("sulfate free",)}
    assert tiny.n_test == 1


def test_human_goals_are_those_with_attributes(tmp_path: Path):
    goals = load(shop(tmp_path), WebshopConfig(goals="human", nouns="rules")).goals
    assert [(goal.instruction, goal.attributes, goal.options, goal.price_upper) for goal in goals] == HUMAN_GOALS


def test_a_limit_is_the_larger_of_two_of_the_four_above(tiny: Catalogue):
    products = [dataclasses.replace(tiny.products[0], price=20.0, options={})] * 200
    goals = synthetic_goals(products, ATTRIBUTES, random.Random(0), "")
    assert {goal.price_upper for goal in goals} == {40.0, 50.0, 60.0}  # of 30, 40, 50 and 60


def test_search_ranks_by_words(tiny: Catalogue):
    assert [product.title for product in tiny.search("LAMPS, shampoos")] == ["Old Lamp", "Lumo Tea Tree Shampoo"]
    assert [product.title for product in tiny.search("lavender")] == ["Lumo Tea Tree Shampoo"]  # an option
    assert tiny.search("good") == []  # the second bullet is not indexed
    assert tiny.search("the") == []


def test_the_digest_is_of_the_files(tmp_path: Path, tiny: Catalogue):
    data = (tmp_path / ENTRIES).read_bytes() + (tmp_path / ITEMS).read_bytes()
    assert tiny.digest == hashlib.sha256(data).hexdigest()


def test_full_files_have_names_of_their_own(tmp_path: Path):
    for name in (ITEMS, ENTRIES):
        (shop(tmp_path) / name).rename(tmp_path / name.replace("_1000", ""))
    assert len(load(tmp_path, WebshopConfig(catalogue="full", nouns="rules")).products) == 4


def broken(item_changes: dict, *without: str) -> list[dict]:
    changed = {**SHOP[1], **item_changes}
    return [SHOP[0], {key: value for key, value in changed.items() if key not in without}]


ENTRY, ANOTHER = ATTRIBUTES["B000000001"], "B000000002"
DAMAGE = [
    ({"items_shuffle_1000": ""}, f"{ITEMS}, line 1: broken or cut short in product 1 (no array)"),
    ({"items_shuffle_1000": '{"a": 1}'}, f"{ITEMS}, line 1: broken or cut short in product 1 (no array)"),
    (
        {"items_shuffle_1000": "[\n\n{'asin'}]"},
        f"{ITEMS}, line 3: broken or cut short in product 1 (Expecting property",
    ),
    ({"items_shuffle_1000": ["B1"]}, f"{ITEMS}, line 2, product 1: 'B1' is not an object"),
    ({"items_shuffle_1000": broken({}, "asin")}, f"{ITEMS}, line 35, product 2 has no 'asin'"),
    ({"items_shuffle_1000": broken({}, "query")}, f"{ITEMS}, line 35, product 2 (B000000002) has no 'query'"),
    ({"items_shuffle_1000": broken({}, "small_description")}, "product 2 (B000000002) has no 'small_description'"),
    ({"items_shuffle_1000": broken({"name": 5})}, f"{ITEMS}, line 35, product 2 (B000000002): 'name' is 5, not a text"),
    (
        {"items_shuffle_1000": broken({}, "customization_options")},
        "product 2 (B000000002) has no 'customization_options'",
    ),
    (
        {"items_shuffle_1000": broken({"customization_options": {"Size": [{}]}})},
        "(B000000002): 'customization_options' is",
    ),
    ({"items_shuffle_1000": broken({"customization_options": ["S"]})}, "(B000000002): 'customization_options' is not"),
    ({"items_shuffle_1000": broken({"pricing": "free"})}, "(B000000002): 'pricing' is 'free', not like '$12.99'"),
    ({"items_shuffle_1000": broken({"pricing": 12})}, "(B000000002): 'pricing' is 12, not like '$12.99'"),
    (
        {"items_shuffle_1000": broken({"small_description": [None]})},
        "'small_description' is [None], not a list of texts",
    ),
    ({"items_shuffle_1000": []}, f"{ITEMS}: 0 products make 0 goals with env.goals = 'synthetic'"),
    ({"items_ins_v2_1000": '{\n"B1": '}, f"{ENTRIES}, line 2: broken or cut short (Expecting value)"),
    ({"items_ins_v2_1000": []}, f"{ENTRIES} holds a JSON list, not an object"),
    ({"items_ins_v2_1000": {ANOTHER: []}}, f"{ENTRIES}, B000000002: [] is not an object"),
    ({"items_ins_v2_1000": {}}, f"{ENTRIES} has no 'B000000001': it belongs to another products file"),
    (
        {"items_ins_v2_1000": {"B000000001": {"instruction": "x"}}},
        f"{ENTRIES}, B000000001: 'instruction_attributes' is None",
    ),
    (
        {"items_ins_v2_1000": {"B000000001": {**ENTRY, "instruction_attributes": []}}},
        f"{ENTRIES}, B000000001: an instruction without 'instruction_attributes'",
    ),
    ({"items_ins_v2_1000": {"B000000001": {**ENTRY, "attributes": 3}}}, f"{ENTRIES}, B000000001: 'attributes' is 3"),
]
HUMAN_DAMAGE = [
    ({"B000000001": {}}, f"{HUMAN}, B000000001: {{}} is not a list of instructions"),
    ({"B000000001": ["x"]}, f"{HUMAN}, B000000001, instruction 1: 'x' is not an object"),
    ({"B000000001": [{"instruction": "x"}]}, "B000000001, instruction 1: 'instruction_attributes' is None"),
    ({"B000000001": [{"instruction_attributes": ["a"]}]}, "B000000001, instruction 1 has no 'instruction'"),
    (
        {"B000000001": [{"instruction_attributes": ["a"], "instruction": "x"}]},
        "B000000001, instruction 1: 'instruction_options' is None, not a list of texts",
    ),
    ({}, "4 products make 0 goals with env.goals = 'human'"),
]


@pytest.mark.parametrize(("changed", "message"), DAMAGE)
def test_damage_is_named_in_one_line(tmp_path: Path, changed: dict, message: str):
    with pytest.raises(UserError) as caught:
        load(shop(tmp_path, **changed), RULES)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("written", "message"), HUMAN_DAMAGE)
def test_damaged_instructions_are_named(tmp_path: Path, written: dict, message: str):
    with pytest.raises(UserError) as caught:
        load(shop(tmp_path, items_human_ins=written), WebshopConfig(goals="human", nouns="rules"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [ITEMS, ENTRIES, HUMAN])
def test_a_missing_file_is_named(tmp_path: Path, name: str):
    (shop(tmp_path) / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing .env.data with env.catalogue = 'small'"):
        load(tmp_path, WebshopConfig(goals="human", nouns="rules"))


def test_a_missing_package_is_named_before_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(UserError, match="needs rapidfuzz: pip install 'paw-trainer"):
        load(shop(tmp_path, items_shuffle_1000="broken"), RULES)


def test_people_are_not_asked_where_goals_are_synthetic(tmp_path: Path):
    (shop(tmp_path) / HUMAN).unlink()
    assert len(load(tmp_path, RULES).goals) == len(GOALS)


def test_what_is_no_utf8_is_named(tmp_path: Path):
    for name in (ITEMS, ENTRIES):
        path = shop(tmp_path) / name
        path.write_bytes(path.read_bytes().replace(b"free", b"fr\xff"))
        with pytest.raises(UserError, match=f"{name}.*: no UTF-8"):
            load(tmp_path, RULES)


def test_a_product_without_end_stops_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "CHUNK", 64)
    monkeypatch.setattr(files, "LARGEST", 256)
    with pytest.raises(UserError, match="line 2: broken or cut short in product 1"):
        load(shop(tmp_path, items_shuffle_1000='[\n{"asin": "' + "B" * 10_000), RULES)


VALUES = st.none() | st.integers() | st.text() | st.lists(st.text(), max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=4),
    chunk=st.integers(1, 40),
    ascii=st.booleans(),
)
def test_an_array_is_read_piece_by_piece(tmp_path_factory, values: list, chunk: int, ascii: bool):
    path = tmp_path_factory.getbasetemp() / "array.json"
    path.write_text(json.dumps(values, indent=chunk % 3 or None, ensure_ascii=ascii), "utf-8")
    digest = hashlib.sha256()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK", chunk)
        assert [value for _, value in files.read_array(path, digest)] == values
    assert digest.digest() == hashlib.sha256(path.read_bytes()).digest()


@settings(max_examples=25, deadline=None)
@given(share=st.floats(0.0, 1.0, exclude_max=True), chunk=st.integers(1, 300))
def test_a_file_cut_anywhere_is_an_error_in_its_line(tmp_path_factory, share: float, chunk: int):
    path = shop(tmp_path_factory.getbasetemp()) / ITEMS
    data = path.read_bytes()
    path.write_bytes(kept := data[: int(share * len(data))])
    messages = []
    for size in (chunk, files.CHUNK):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="cut short in product") as caught:
            patch.setattr(files, "CHUNK", size)
            list(files.read_array(path, hashlib.sha256()))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]  # however it is read
    line = int(messages[0].split("line ")[1].split(":")[0])
    assert kept.count(b"\n") - 2 <= line <= kept.count(b"\n") + 1


@pytest.fixture(scope="module")
def made() -> Catalogue:
    return generated(WebshopConfig(products=600, nouns="rules"))


def test_the_generated_shop_is_a_function_of_its_seed(made: Catalogue):
    assert generator.records(50, 3) == generator.records(50, 3) != generator.records(50, 4)
    assert generated(WebshopConfig(products=600, nouns="rules")) is made
    assert made.digest != generated(WebshopConfig(products=600, nouns="rules"), seed=1).digest
    assert len(made.products) == len(made.by_asin) == 600
    assert made.n_test == 500 and len(made.goals) > 2000
    assert {product.category for product in made.products} == set(ROOTS)
    assert {product.query for product in made.products} == {ware.query for ware in WARES}
    assert 0.05 < sum(not product.options for product in made.products) / 600 < 0.3


def test_written_files_are_the_generated_shop(tmp_path: Path):
    generator.write(tmp_path, 120)
    for goals in ("synthetic", "human"):
        config = WebshopConfig(products=120, goals=goals, nouns="rules")
        read, direct = load(tmp_path, config), generated(config)
        assert read.products == direct.products and read.goals == direct.goals


def test_a_generated_goal_is_met_by_its_own_product(made: Catalogue):
    human = generated(WebshopConfig(products=120, goals="human", nouns="rules"))
    for catalogue in (made, human):
        for goal in catalogue.goals[:1000]:
            assert all(attribute in goal.instruction for attribute in goal.attributes)
            assert all(value in goal.instruction for value in goal.options.values())
            product = catalogue.by_asin[goal.asin.lower()]
            assert reward(product, goal, goal.options, "rules").total == 1.0
            assert product.price < goal.price_upper or goal.price_upper == math.inf


def test_values_of_options_differ_from_each_other():
    for name, text in OPTIONS.values():
        values = text.split(", ")
        assert all({*base_colour(value).split()} <= {*value.split()} for value in values)
        if name == "color":
            assert len({base_colour(value) for value in values}) == len(values)


def test_near_misses_surround_a_goal(made: Catalogue):
    """Of the same brand and type stand products that fail in one thing: an attribute, an option or the price."""
    missed = Counter()
    for goal in made.goals[:60]:
        for product in made.search(f"{goal.name} {goal.query}"):
            chosen = {name: value for name, value in goal.options.items() if value in product.options.get(name, ())}
            found = reward(product, goal, chosen, "rules")
            parts = {"attributes": found.attributes == 1, "options": found.options == 1, "price": found.price}
            if found.type == 1 and sum(parts.values()) == 2:
                missed[min(parts, key=parts.__getitem__)] += 1
    assert all(missed[part] > 9 for part in ("attributes", "options", "price")), missed
