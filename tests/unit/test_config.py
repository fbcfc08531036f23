"""Recipes, overrides, and mistakes that are named in one line before anything is loaded."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paw.config import Config
from paw.errors import UserError
from paw.recipe import RECIPES, dump, known_keys, load, recipe_names, validate

MODEL = '[model]\npath = "some/model"\n'


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe; returns its path."""

    def write(text=MODEL):
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problem(*arguments) -> str:
    with pytest.raises(UserError) as caught:
        load(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def value(config: Config, key: str):
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize("name", recipe_names())
def test_every_packaged_recipe_resolves_and_says_what_it_is(name):
    text = (RECIPES / f"{name}.toml").read_text(encoding="utf-8")
    assert text.startswith("# ") and text.splitlines()[1].startswith("# ")
    config = load(name)
    written = tomllib.loads(text)
    written.pop("base", None)
    for section, table in written.items():
        for key in table:
            assert f"{section}.{key}" in known_keys()
    assert load_text(dump(config)) == config


def load_text(text: str) -> Config:
    return validate(tomllib.loads(text), origin="text")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("optim.lrr", "optim.lr"),
        ("optim.learning_rate", None),
        ("rollout.group_sise", "rollout.group_size"),
        ("lr", "optim.lr"),
        ("group_size", "rollout.group_size"),
        ("rollout.lr", "optim.lr"),  # a right name in the wrong section
        ("policy.rho", "wm.rho"),
        ("wm.foo.bar", None),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(recipe, wrong, right):
    *section, name = wrong.split(".")
    header = f"[{'.'.join(section)}]\n" if section else ""
    from_file = problem(recipe(f"{header}{name} = 1\n{MODEL}"))
    assert str(recipe(MODEL)) in from_file
    from_command_line = problem(recipe(MODEL), {wrong: "1"})
    assert from_command_line.startswith(f"command line: unknown key '--{wrong}'")
    for message in (from_file, from_command_line):
        if right:
            assert f"did you mean '{right}'?" in message
    if len(section) < 2:
        assert f"unknown key '{wrong}'" in from_file


def test_a_name_like_no_other_gets_no_suggestion(recipe):
    assert problem(recipe(), {"zzzqqq": "1"}) == "command line: unknown key '--zzzqqq'"


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("optim.lr", "-1", "optim.lr = -1: Input should be greater than 0"),
        ("optim.lr", "fast", "optim.lr = 'fast': Input should be a valid number"),
        ("optim.lr", "nan", "finite"),
        ("optim.lr", "inf", "finite"),
        ("optim.lr", "{a = 1}", "valid number"),
        ("optim.lr", "1\nx = 2", "valid number"),
        ("optim.betas", "[0.9]", "optim.betas.1"),
        ("optim.betas", "[0.9, 1.5]", "optim.betas.1 = 1.5"),
        ("run.updates", "0", "greater than or equal to 1"),
        ("run.updates", "1.5", "valid integer"),
        ("run.name", "", "at least 1 character"),
        ("run.trackers", "wandb", "valid list"),
        ("wm.enabled", "maybe", "valid boolean"),
        ("wm.alpha", "0", "greater than 0"),
        ("wm.alpha", "1.1", "less than or equal to 1"),
        ("wm.weight", "-1", "'adaptive', or Input should be greater than or equal to 0"),
        ("wm.weight", "adaptiv", "'adaptive', or Input should be a valid number"),
        ("wm.loss", "l2", "'cmae', 'mae', 'ce' or 'gce'"),
        ("env.kinds", '["pikc"]', "env.kinds.0 = 'pikc'"),
        ("rollout.engine", "vlm", "'transformers' or 'vllm'"),
        ("policy.dual_clip", "1.0", "greater than 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_origin(recipe, key, text, reason):
    message = problem(recipe(), {key: text})
    assert message.startswith(f"command line: {key}")
    assert reason in message


def test_a_wrong_value_of_the_recipe_names_the_file(recipe):
    path = recipe(MODEL + "[optim]\nlr = 0\n")
    assert problem(path) == f"{path}: optim.lr = 0: Input should be greater than 0"
    assert problem(path, {"optim.betas": "[0.9, 0.9]"}).startswith(str(path))


def test_group_arithmetic_is_checked_first(recipe):
    assert "rollout.group_size = 1 leaves rloo without a baseline" in problem(
        recipe(), {"rollout.group_size": "1", "advantage.estimator": "rloo"}
    )


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("optim.lr", "5e-4", 5e-4),
        ("optim.lr", "1", 1.0),
        ("run.seed", "-3", -3),
        ("wm.enabled", "false", False),
        ("wm.enabled", "False", False),
        ("wm.enabled", "true", True),
        ("env.kinds", '["pick", "look"]', ["pick", "look"]),
        ("env.kinds", "['heat']", ["heat"]),
        ("run.trackers", "[]", []),
        ("optim.betas", "[0.9, 0.99]", (0.9, 0.99)),
        ("env.style", "compact", "compact"),
        ("env.style", '"compact"', "compact"),
        ("model.path", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
        ("model.path", "7", "7"),
        ("run.name", "2026-07-01", "2026-07-01"),
        ("run.name", "1e3", "1e3"),
        ("run.dir", "out/x", Path("out/x")),
        ("wm.weight", "0.5", 0.5),
        ("wm.weight", "adaptive", "adaptive"),
        ("advantage.similarity", "0.9", 0.9),
        ("advantage.similarity", "none", None),
        ("env.data", "/games", Path("/games")),
        ("env.data", "none", None),
    ],
)
def test_overrides(recipe, key, text, expected):
    path = recipe(MODEL + '[env]\ndata = "x"\n[advantage]\nsimilarity = 0.5\n')
    found = value(load(path, {key: text}), key)
    assert found == expected and type(found) is type(expected)


def test_an_override_beats_the_recipe_and_leaves_the_rest(recipe):
    path = recipe(MODEL + "[optim]\nlr = 1e-3\nepochs = 2\n")
    config = load(path, {"optim.lr": "2e-3"})
    assert (config.optim.lr, config.optim.epochs, config.run) == (2e-3, 2, load(path).run)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'model.path' is missing; set it in the recipe or with --model.path VALUE"),
        ("[model]\n", "'model.path' is missing"),
        ("[model\n", "not valid TOML"),
        (MODEL + 'path = "y"\n', "not valid TOML"),
        ("\ufeff" + MODEL, "not valid TOML"),
        ("model = 3\n", "model = 3"),
    ],
)
def test_malformed_recipes(recipe, text, reason):
    path = recipe(text)
    message = problem(path)
    assert message.startswith(f"{path}: ") and reason in message


def test_a_recipe_that_is_not_text(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not valid TOML" in problem(path)


def test_a_table_takes_one_key_at_a_time_or_all(recipe):
    options = {"model.chat_template_kwargs.enable_thinking": "false", "model.chat_template_kwargs.effort": "low"}
    config = load(recipe(), options)
    assert config.model.chat_template_kwargs == {"enable_thinking": False, "effort": "low"}
    assert load(recipe(), {"model.chat_template_kwargs": "{enable_thinking = false}"}).model.chat_template_kwargs == {
        "enable_thinking": False
    }
    assert "unknown key '--wm.rho.x'" in problem(recipe(), {"wm.rho.x": "1"})


def test_an_override_into_what_is_no_section(recipe):
    assert "optim = 3" in problem(recipe("optim = 3\n" + MODEL), {"optim.lr": "1"})


def test_unknown_recipes():
    assert "did you mean 'quickstart'?" in problem("quikstart")
    everything = problem("zzzqqq")
    assert all(name in everything for name in recipe_names())
    assert "unknown recipe 'nowhere.toml'" in problem("nowhere.toml")


def test_what_is_dumped_loads_to_the_same(recipe):
    config = load("quickstart", {"run.dir": "a b/ü", "wm.weight": "0.25", "env.data": "/x", "optim.lr": "1e-7"})
    assert load(recipe(dump(config))) == config
    assert load_text(dump(load_text(dump(config)))) == config


def test_a_configuration_does_not_change():
    config = load("quickstart")
    with pytest.raises(ValueError, match="frozen"):
        config.optim.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_configuration_needs_no_torch():
    code = "import sys, paw.recipe; paw.recipe.load('quickstart'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def family(folder, **recipes):
    """Writes recipes; {name: text}."""
    folder.mkdir(exist_ok=True)
    for name, text in recipes.items():
        (folder / f"{name}.toml").write_text(text)


def test_a_recipe_overrides_keys_of_its_base(tmp_path):
    family(
        tmp_path / "sub",
        old='[model]\npath = "m"\n[optim]\nlr = 1e-3\nepochs = 2\n',
        middle='base = "old.toml"\n[optim]\nlr = 2e-3\n[wm]\nrho = 0.5\n',
    )
    family(tmp_path, young='base = "sub/middle.toml"\n[wm]\nalpha = 0.5\n')
    config = load(tmp_path / "young.toml", {"wm.rho": "0.3"})
    assert (config.optim.lr, config.optim.epochs, config.wm.rho, config.wm.alpha) == (2e-3, 2, 0.3, 0.5)
    assert config == load_text(dump(config)) and "\nbase" not in dump(config)


def test_a_recipe_on_a_packaged_one(recipe):
    own = recipe('base = "quickstart"\n[optim]\nlr = 0.001\n')
    assert load(own) == load("quickstart", {"optim.lr": "0.001"})


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ('"quikstart"', "mine.toml: base: unknown recipe 'quikstart': did you mean 'quickstart'?"),
        ('"absent.toml"', "mine.toml: base: unknown recipe 'absent.toml'"),
        ('"mine.toml"', "mine.toml: base: 'mine.toml' is itself built on this recipe"),
        ('"other.toml"', "other.toml: base: 'mine.toml' is itself built on this recipe"),
        ("3", "mine.toml: base = 3: it takes the name of a recipe or the path of a .toml file"),
        ('""', "mine.toml: base: unknown recipe ''"),
    ],
)
def test_a_base_that_cannot_be(recipe, tmp_path, base, reason):
    family(tmp_path, other='base = "mine.toml"\n')
    assert reason in problem(recipe(f"base = {base}\n{MODEL}"))


def test_a_wrong_value_names_the_file_it_is_in(recipe, tmp_path):
    family(tmp_path, old="[wm]\nrho = 2\nalpah = 1\n[optim]\noffload = true\n")
    path = recipe(f'base = "old.toml"\n{MODEL}')
    assert problem(path, {"wm.rho": "1"}).startswith(f"{tmp_path / 'old.toml'}: unknown key 'wm.alpah'; did you mean")
    family(tmp_path, old="[wm]\nrho = 2\n[optim]\noffload = true\n")
    assert problem(path).startswith(f"{tmp_path / 'old.toml'}: wm.rho = 2: ")
    assert problem(path, {"wm.rho": "3"}).startswith("command line: wm.rho = 3: ")
    assert problem(path, {"wm.rho": "1"}).startswith(f"{tmp_path / 'old.toml'}: optim.offload needs")
    assert problem(recipe(), {"rollout.group_size": "1"}).startswith("command line: rollout.group_size = 1 leaves grpo")
