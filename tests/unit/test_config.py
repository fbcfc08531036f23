"""Recipes, overrides, and mistakes that are named in one line before anything is loaded."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paw.config import Config
from paw.errors import UserError
from paw.recipe import dump, load, recipe_names, validate

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


def load_text(text: str) -> Config:
    return validate(tomllib.loads(text), origin="text")


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("optim.lrr", "; did you mean 'optim.lr'?"),
        ("rollout.group_sise", "; did you mean 'rollout.group_size'?"),
        ("rollout.lr", "; did you mean 'optim.lr'?"),  # a right name in the wrong section
        ("policy.rho", "; did you mean 'wm.rho'?"),
        ("lr", "; did you mean 'optim.lr'?"),
        ("zzzqqq", ""),
        # names of TRL and verl
        ("learning_rate", "; it is 'optim.lr' here"),
        ("optim.learning_rate", "; it is 'optim.lr' here"),
        ("num_generations", "; it is 'rollout.group_size' here"),
        ("rollout.n", "; it is 'rollout.group_size' here"),
        ("max_steps", "; it is 'run.updates' here"),
        ("output_dir", "; it is 'run.dir' here"),
        ("beta", "; it is 'policy.kl_coef' here"),
        ("kl_loss_coef", "; it is 'policy.kl_coef' here"),
        ("clip_ratio", "; it is 'policy.clip_low' here"),
        # keys that moved or left
        ("advantage.estimator", "; it is 'advantage.type' now"),
        ("agent.kind", "; it is 'agent.type' now"),
        ("webshop.products", "; it is 'env.products' now"),
        ("search.retriever", "; it is 'env.retriever' now"),
        ("simulator.url", "; it is 'env.simulator.url' now"),
        ("rwml.triplets", "; it is 'env.triplets' now"),
        ("critic.gamma", "; it is 'advantage.gamma' now"),
        ("wm.horizon", "; wm.horizon was removed: it did not help where it was measured (docs/experiments.md)"),
        # keys of another choice
        ("env.products", "; env.name = 'webshop' has it"),
        ("advantage.omega", "; advantage.type = 'gigpo' has it"),
        ("agent.trials", "; agent.type = 'reflexion' has it"),
        ("wm.q", "; it needs wm.loss = 'gce'"),
        ("critic.lr", "; it needs advantage.type = 'ppo'"),
        ("lora.alpha", "; it needs lora.rank"),
        ("warmup.lr", "; it needs model.path = 'quickstart'"),
        ("rollout.sleep_level", "; it needs rollout.engine = 'vllm'"),
        ("optim.offload", "; it needs optim.name = 'flash-adamw'"),
    ],
)
def test_an_unknown_key_is_refused_with_what_was_meant(recipe, wrong, hint):
    *section, name = wrong.split(".")
    header = f"[{'.'.join(section)}]\n" if section else ""
    from_file = problem(recipe(f"{header}{name} = 1\n{MODEL}"))
    assert from_file in (f"{recipe()}: unknown key '{key}'{hint}" for key in (wrong, section[0] if section else wrong))
    from_command_line = problem(recipe(MODEL), {wrong: "1"})
    assert from_command_line.removeprefix("command line: unknown key '").replace("--", "") == f"{wrong}'{hint}"


def test_a_choice_leaves_the_keys_of_the_one_before_it_behind(recipe):
    path = recipe(MODEL + '[advantage]\ntype = "gigpo"\nomega = 2.0\neps = 0.5\n[wm]\nrho = 0.3\nmax_tokens = 9\n')
    config = load(path, {"advantage.type": "grpo", "wm.enabled": "False"})
    assert config.advantage.settings() == {"stat": "steps", "norm_std": True, "eps": 0.5}
    assert (config.wm.enabled, config.wm.rho, config.wm.max_tokens) == (False, 0.2, 9)
    assert "omega" not in dump(config) and "rho" not in dump(config)
    message = problem(path, {"advantage.type": "grpo", "advantage.omega": "2"})
    assert message == "command line: unknown key '--advantage.omega'; advantage.type = 'gigpo' has it"
    assert problem(path, {"wm.enabled": "false", "wm.rho": "0.1"}).endswith("'wm.rho'; it needs wm.enabled = True")


def test_a_plug_in_of_ones_own_brings_its_keys(recipe, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("""
from paw.config import EnvConfig

class Maze:
    class Config(EnvConfig):
        depth: int = 3

def best(samples, *, width: float = 1.0): ...
def token(logp, entropy, batch, *, floor: float = 0.0): ...
""")
    monkeypatch.chdir(tmp_path)
    chosen = {"env.name": "mine.py:Maze", "advantage.type": "mine.py:best"}
    config = load(recipe(), chosen | {"env.depth": "4", "advantage.width": "2", "env.max_turns": "7"})
    assert config.env.settings() == {"depth": 4} and config.advantage.settings() == {"width": 2.0}
    assert load(recipe(dump(config))) == config
    assert problem(recipe(), chosen | {"env.dept": "4"}).endswith("unknown key '--env.dept'; did you mean 'env.depth'?")
    assert problem(recipe(), chosen | {"env.depth": "deep"}).startswith(
        "command line: env.depth = 'deep': Input should"
    )
    assert problem(recipe(), chosen | {"env.kinds": "[]"}).endswith("'--env.kinds'; env.name = 'alfworld' has it")
    assert load(recipe(), {"policy.loss": "mine.py:token", "policy.floor": "2"}).policy.settings() == {"floor": 2.0}
    missing = problem(recipe(), {"env.name": "mine.py:Mase"})
    assert missing == "command line: env.name = 'mine.py:Mase': the file has no 'Mase'; did you mean 'Maze'?"


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
        ("run.trackers", "wandbee", "'wandb' or 'trackio'"),
        ("wm.enabled", "maybe", "valid boolean"),
        ("wm.alpha", "0", "greater than 0"),
        ("wm.alpha", "1.1", "less than or equal to 1"),
        ("wm.weight", "-1", "'adaptive', or Input should be greater than or equal to 0"),
        ("wm.weight", "adaptiv", "'adaptive', or Input should be a valid number"),
        ("wm.loss", "l2", "there is no 'l2'"),
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
        recipe(), {"rollout.group_size": "1", "advantage.type": "rloo"}
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
        ("run.trackers", "wandb", ["wandb"]),
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
    path = recipe(MODEL + '[env]\ndata = "x"\n[advantage]\ntype = "gigpo"\nsimilarity = 0.5\n')
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
    assert problem("nowhere.toml") == "nowhere.toml: no such file"


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


def test_bases_override_one_another_in_order(tmp_path):
    family(tmp_path, a="[optim]\nlr = 1e-3\nepochs = 2\n", b="[optim]\nlr = 2e-3\n[wm]\nrho = 0.5\n")
    path = tmp_path / "c.toml"
    path.write_text('base = ["qwen2.5-7b", "a.toml", "b.toml"]\n[wm]\nalpha = 0.5\n')
    config = load(path)
    assert (config.optim.lr, config.optim.epochs, config.wm.rho, config.wm.alpha) == (2e-3, 2, 0.5, 0.5)
    assert config.model.path == "Qwen/Qwen2.5-7B-Instruct"


def test_a_recipe_on_a_packaged_one(recipe):
    own = recipe('base = "quickstart"\n[optim]\nlr = 0.001\n')
    assert load(own) == load("quickstart", {"optim.lr": "0.001"})


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ('"quikstart"', "mine.toml: base: unknown recipe 'quikstart': did you mean 'quickstart'?"),
        ('"absent.toml"', "absent.toml: no such file"),
        ('"mine.toml"', "mine.toml: base: 'mine.toml' is itself built on this recipe"),
        ('"other.toml"', "other.toml: base: 'mine.toml' is itself built on this recipe"),
        ('["quickstart", "other.toml"]', "other.toml: base: 'mine.toml' is itself built on this recipe"),
        ('["quickstart", 3]', "base = ['quickstart', 3]: it takes"),
        ("3", "mine.toml: base = 3: it takes the name of a recipe or the path of a .toml file, or a list of them"),
        ('""', "mine.toml: base: unknown recipe ''"),
    ],
)
def test_a_base_that_cannot_be(recipe, tmp_path, base, reason):
    family(tmp_path, other='base = "mine.toml"\n')
    assert reason in problem(recipe(f"base = {base}\n{MODEL}"))


def test_a_wrong_value_names_the_file_it_is_in(recipe, tmp_path):
    family(tmp_path, old="[wm]\nrho = 2\nalpah = 1\n[lora]\nrank = 1\n")
    path = recipe(f'base = "old.toml"\n{MODEL}')
    assert problem(path, {"wm.rho": "1"}).startswith(f"{tmp_path / 'old.toml'}: unknown key 'wm.alpah'; did you mean")
    family(tmp_path, old='[wm]\nrho = 2\n[lora]\nrank = 1\n[advantage]\ntype = "ppo"\n')
    assert problem(path).startswith(f"{tmp_path / 'old.toml'}: wm.rho = 2: ")
    assert problem(path, {"wm.rho": "3"}).startswith("command line: wm.rho = 3: ")
    assert problem(path, {"wm.rho": "1"}).startswith(f"{tmp_path / 'old.toml'}: lora.rank with")
    assert problem(recipe(), {"rollout.group_size": "1"}).startswith("command line: rollout.group_size = 1 leaves grpo")
