"""The packaged recipes: their descriptions, the paper's settings, their page, and whether they fit
their GPUs."""

import json
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from paw.config.keys import flatten, keys_of
from paw.config.recipe import (
    RECIPES,
    as_tree,
    base_names,
    dump,
    load,
    read_recipe,
    recipe_names,
    validate,
)
from paw.config.sections import Config
from paw.tools.experiment.results import PAPER
from paw.tools.experiment.runs import VARIANTS
from paw.tools.plan.fit import Machine, check_fits, get
from paw.tools.plan.plan import Plan
from paw.tools.plan.shapes import shape_of

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
NUMBERS = {"No": 0, "One": 1, "Two": 2, "Four": 4, "Eight": 8, "Sixteen": 16}
SIZES = {
    "-7b": "Qwen2.5-7B-Instruct",
    "-14b": "Qwen2.5-14B-Instruct",
    "-llama-3b": "Llama-3.2-3B-Instruct",
    "-qwen3": "Qwen3-1.7B",
}


@cache
def page() -> dict[str, tuple[str, int, float]]:
    """The table of docs/recipes.md: recipe -> (description, number of GPUs, GB per GPU)."""
    rows = re.findall(
        r"^\| (.*) \| (No|One|Two|Four|Eight|Sixteen) GPUs?(?: of (\d+) GB)?[^|]* \| "
        r"`paw train ([\w.-]+)(?: --gpus (\d+))?` \|$",
        PAGE.read_text(encoding="utf-8"), re.MULTILINE,
    )  # fmt: skip
    for _, number_word, _, _, gpu_option in rows:
        assert int(gpu_option or 1) == max(1, NUMBERS[number_word])
    return {
        name: (description, NUMBERS[number_word], float(gib or 0))
        for description, number_word, gib, name, _ in rows
    }


def test_the_page_has_a_row_for_each_recipe():
    assert sorted(page()) == recipe_names()


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_resolves_fits_its_gpus_and_is_what_its_name_and_its_row_say(name):
    description, gpu_count, gpu_gib = page()[name]
    config = load(name)
    assert validate(tomllib.loads(dump(config)), origin="text") == config
    path = RECIPES / f"{name}.toml"
    if path.is_file():
        first_line, second_line, third_line = path.read_text(encoding="utf-8").splitlines()[:3]
        assert first_line.startswith("# ")
        assert second_line.startswith("# ")
        assert not third_line.startswith("#")
    model = config.model.path
    if gpu_count:
        if model.startswith("runs/"):  # a model that another recipe has trained
            model = load(model.split("/")[1]).model.path
        check_fits(config, shape_of(model), Machine(gpus=gpu_count, gpu_gib=gpu_gib))
        # `paw plan` agrees.
        assert not Plan(config, shape_of(model), gpus=gpu_count, gpu_gib=gpu_gib).reasons()
    else:
        assert model == "quickstart"
    baseline = name.replace("-paw", "")
    if baseline != name and baseline in recipe_names():
        without = load(baseline)
        assert config.wm.enabled
        assert not without.wm.enabled
        assert config.model_copy(update={"wm": without.wm}) == without
    if description.startswith("Table"):
        assert model.rpartition("/")[2] in description
        assert config.env.name in name
        for suffix, model_size in SIZES.items():
            assert name.endswith(suffix) == (model_size in description)
        labels = {"ppo": "PPO", "rloo": "RLOO", "gigpo": "GiGPO", "grpo": "GRPO"}
        assert re.search(rf"\b{labels[config.advantage.type]}\b", description)
        _, _, method = description.partition(":")
        assert config.wm.enabled == ("PaW" in method.partition(" baseline of")[0])
        assert config.wm.enabled == ("paw" in name)


def test_each_base_says_what_it_sets():
    for name in base_names():
        settings_by_key, _ = read_recipe(name)
        assert settings_by_key, name
        assert keys_of(Config, settings_by_key), name


BY_BENCHMARK = {  # PaW's settings for each benchmark: (ALFWorld, WebShop, search)
    "rollout.tasks": (16, 16, 256), "rollout.group_size": (8, 8, 5), "rollout.max_prompt_tokens": (2048, 4096, 4096),
    "rollout.max_response_tokens": (512, 512, 512), "env.max_turns": (50, 15, 4), "env.reward": (10.0, 10.0, 1.0),
    "env.invalid_penalty": (0.1, 0.1, 0.01), "optim.minibatch_samples": (256, 64, 512), "optim.lr": (1e-6, 1e-6, 1e-6),
    "optim.warmup_updates": (0, 0, 66), "run.updates": (150, 150, 662), "policy.kl_coef": (0.01, 0.01, 0.001),
    "policy.entropy_coef": (0.001, 0.001, 0.0), "eval.temperature": (0.4, 0.4, 0.0), "wm.alpha": (0.75, 0.75, 0.75),
    "wm.rho": (0.2, 0.2, 0.2), "wm.loss": ("cmae", "cmae", "cmae"), "wm.weight": ("adaptive", "adaptive", "adaptive"),
    "advantage.similarity": (None, None, 0.9), "advantage.norm_std": (True, True, True),
}  # fmt: skip


@pytest.mark.parametrize(("column", "env"), enumerate(["alfworld", "webshop", "search"]))
def test_the_papers_settings(column, env):
    config = load(f"{env}-gigpo-paw")
    expected = {key: values[column] for key, values in BY_BENCHMARK.items()}
    assert {key: get(config, key) for key in BY_BENCHMARK} == expected


# --- what the paper states

PRINTED = Path(__file__).parents[3] / "shared" / "data" / "paper" / "tables.json"
METHODS = {"GRPO": "grpo", "GRPO w/ PaW": "grpo-paw", "GIGPO": "gigpo", "GIGPO w/ PaW": "gigpo-paw"}
METHODS |= {"Search-R1": "r1", "ZeroSearch": "zerosearch"}
ABLATIONS = {"GRPO": "grpo", "GRPO w/ PaW": "grpo-paw", "constant lambda = 1": "paw-constant"}
ABLATIONS |= {"cross-entropy in place of CMAE": "paw-ce"}
OTHERS = ("search-r1", "search-zerosearch")
"""Recipes for methods of other papers, with the settings of those papers."""
SETTINGS = {
    "max_prompt": "rollout.max_prompt_tokens", "max_response": "rollout.max_response_tokens",
    "max_turns": "env.max_turns", "lr": "optim.lr", "critic_lr": "critic.lr", "reward": "env.reward",
    "reward_max": "env.reward", "invalid_penalty": "env.invalid_penalty", "groups": "rollout.tasks",
    "train_batch": "rollout.tasks", "group_size": "rollout.group_size", "gigpo_omega": "advantage.omega",
    "gigpo_gamma": "advantage.gamma", "gigpo_norm": "advantage.norm_std", "gigpo_similarity": "advantage.similarity",
    "temperature": "rollout.temperature", "eval_temperature": "eval.temperature",
    "minibatch": "optim.minibatch_samples", "history": "env.history",
}  # fmt: skip


@pytest.fixture(scope="module")
def printed():
    if not PRINTED.is_file():
        pytest.skip("what the paper prints is not at hand")
    return json.loads(PRINTED.read_text(encoding="utf-8"))


def rows_of(printed) -> dict[str, tuple[str, str]]:
    """Recipe of each trained row -> (its table, its model)."""
    rows = {}
    size_suffixes = {"Qwen2.5-7B-Instruct": "-7b"}
    for table, environments in (("table1", ("alfworld", "webshop")), ("table2", ("search",))):
        for row in printed[table]:
            if row["method"] not in METHODS:
                continue
            name_end = METHODS[row["method"]] + size_suffixes.get(row["base"], "")
            for environment in environments:
                rows[f"{environment}-{name_end}"] = (table, row["base"])
    for row in printed["table3"]["rows"]:
        model = row["model"].replace("Llama3", "Llama-3")
        size_suffix = next((suffix for suffix, name in SIZES.items() if name == model), "")
        for paw_suffix in ("", "-paw"):
            rows[f"webshop-{row['rl'].lower()}{paw_suffix}{size_suffix}"] = ("table3", model)
    for row in printed["table4"]["rows"]:
        for environment in ("alfworld", "webshop"):
            recipe = f"{environment}-{ABLATIONS[row['method']]}"
            rows.setdefault(recipe, ("table4", "Qwen2.5-1.5B-Instruct"))
    return rows


def test_there_is_a_recipe_for_each_trained_row_and_no_other(printed):
    rows = rows_of(printed)
    claimed = {name for name in recipe_names() if page()[name][0].startswith("Table")}
    assert claimed == rows.keys()
    for name, (table, model) in rows.items():
        assert load(name).model.path.rpartition("/")[2] == model
        assert page()[name][0].startswith(f"Table {table[-1]}")


def test_the_settings_are_those_the_paper_prints(printed):
    for name in rows_of(printed):
        if name.startswith(OTHERS):
            continue
        config = load(name)
        expected = dict(printed["hyperparameters"][config.env.name])
        for key in ("products", "instructions", "trained_on"):  # keys of the user's own files
            expected.pop(key, None)
        if expected.pop("retriever", "") == "E5":
            assert get(config, "env.retriever") == "dense", name
            assert "e5" in get(config, "env.encoder"), name
        environments = expected.pop("ppo_environments", None)
        if config.advantage.type == "ppo":
            expected |= {"groups": environments, "group_size": 1}
        if config.advantage.type != "gigpo":
            expected = {
                key: value for key, value in expected.items() if not key.startswith("gigpo_")
            }
        else:
            expected["gigpo_norm"] = {"normalised (std)": True}[
                expected.get("gigpo_norm", "normalised (std)")
            ]
        if expected["history"] == "complete":
            expected["history"] = config.env.max_turns
        assert {key: get(config, SETTINGS[key]) for key in expected} == expected, name
        paw = printed["hyperparameters"]["paw"]
        if config.wm.enabled:
            assert config.wm.alpha == paw["alpha"]
            assert config.wm.rho == paw["rho"]


def test_the_numbers_beside_ours_are_those_the_paper_prints(printed):
    numbers: dict[tuple[str, str], dict[str, float]] = {}

    def put(environment: str, model: str, arm: str, value: float) -> None:
        name = model.removesuffix("-Instruct").replace("Llama3", "Llama-3")
        assert numbers.setdefault((environment, name), {}).setdefault(arm, value) == value

    columns = (
        ("table1", "alfworld", "all"),
        ("table1", "webshop", "webshop_success"),
        ("table2", "search", "avg"),
    )
    for table, environment, column in columns:
        for row in printed[table]:
            if arm := METHODS.get(row["method"], "").replace("grpo-paw", "paw"):
                put(environment, row["base"], arm, row[column])
    for row in printed["table3"]["rows"]:
        arm = row["rl"].lower()
        put("webshop", row["model"], arm, row["vanilla"])
        put("webshop", row["model"], "paw" if arm == "grpo" else f"{arm}-paw", row["paw"])
    for row in printed["table4"]["rows"]:
        arm = ABLATIONS[row["method"]].replace("grpo-paw", "paw").removeprefix("paw-")
        for environment in ("alfworld", "webshop"):
            put(environment, "Qwen2.5-1.5B-Instruct", arm, row[environment])
    for values_by_arm in numbers.values():  # baselines outside the comparison
        for arm in ("r1", "zerosearch"):
            values_by_arm.pop(arm, None)
    assert {
        (environment, model): values_by_arm
        for environment, models in PAPER.items()
        for model, values_by_arm in models.items()
    } == numbers
    assert {arm for values_by_arm in numbers.values() for arm in values_by_arm} <= VARIANTS.keys()


def test_what_the_variants_change():
    def differences(name: str, other: str) -> dict:
        keys = flatten(as_tree(load(name)))
        other_keys = flatten(as_tree(load(other)))
        changed = {}
        for key in keys | other_keys:
            if keys.get(key) != other_keys.get(key):
                changed[key] = keys.get(key)
        return changed

    grpo_recipe = "alfworld-grpo-paw"
    shop_recipe = "webshop-grpo-paw"
    gigpo_settings = {"advantage.type": "gigpo", "advantage.omega": 1.0, "advantage.gamma": 0.95}
    cross_entropy = {"wm.loss": "ce", "wm.rho": None}
    constant = {"wm.weight": 1.0}
    assert differences("alfworld-paw-ce", grpo_recipe) == cross_entropy
    assert differences("webshop-paw-ce", shop_recipe) == cross_entropy
    assert differences("alfworld-paw-constant", grpo_recipe) == constant
    assert differences("webshop-paw-constant", shop_recipe) == constant
    assert differences("alfworld-echo", grpo_recipe) == {
        **cross_entropy,
        "wm.weight": 0.05,
        "wm.alpha": 1.0,
    }
    assert differences("alfworld-dr-grpo-paw", grpo_recipe) == {"advantage.norm_std": False}
    assert differences("alfworld-gigpo-paw", grpo_recipe) == gigpo_settings
    rloo_settings = {"advantage.type": "rloo", "advantage.norm_std": None, "advantage.eps": None}
    assert differences("webshop-rloo-paw", shop_recipe) == rloo_settings
    changes = differences("webshop-ppo-paw", shop_recipe)
    others = {
        key: value
        for key, value in changes.items()
        if not key.startswith(("advantage.", "critic."))
    }
    assert changes["advantage.type"] == "ppo"
    assert others == {
        "rollout.tasks": 128,
        "rollout.group_size": 1,
        "rollout.refill": None,
    }
