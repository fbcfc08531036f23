"""Recipes, overrides and plug-ins. Each mistake is reported in one line before anything is
loaded."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from paw.config import Section, plugins
from paw.config.hints import FORMER_KEYS, SYNONYMS, hint, plugin_keys
from paw.config.keys import keys_of
from paw.config.recipe import dump, load, recipe_names, warnings
from paw.config.sections import Config, EnvConfig, PolicyConfig
from paw.errors import UserError

MODEL = '[model]\npath = "some/model"\n'


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe. Returns its path."""

    def write(text=MODEL, name="mine"):
        path = tmp_path / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problem(*arguments) -> str:
    with pytest.raises(UserError) as caught:
        load(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


MEANT = {
    "optim.lrr": "; did you mean 'optim.lr'?",
    "policy.kl": "; did you mean 'policy.kl_coef'?",  # the beginning of a name
    "polcy": "; did you mean the section [policy]?",
    "rollout.lr": "; did you mean 'optim.lr'?",  # a right name in the wrong section
    "lr": "; did you mean 'optim.lr'?",
    "zzzqqq": "",
    # names of TRL and verl
    "learning_rate": "; it is 'optim.lr' here",
    "rollout.n": "; it is 'rollout.group_size' here",
    "max_steps": "; it is 'run.updates' here",
    "output_dir": "; it is 'run.dir' here",
    "beta": "; it is 'policy.kl_coef' here",
    # keys of earlier versions
    "policy.is_mask": "; it is 'policy.importance_mask' now",
    "policy.verl_rows": "; it is 'policy.verl_samples' now",
    "wm.horizon": "; it was removed",
    # keys of another choice
    "env.simulator.noise": "; [env] has no key like it, nor has a built-in env.name",
    "env.products": "; env.name = 'webshop' has it",
    "agent.trials": "; agent.type = 'reflexion' has it",
    "policy.omega": "; advantage.type = 'gigpo' has 'advantage.omega'",
    # unlike any key: that "policy.clip_low" begins with the same section does not count
    "policy.tau_down": "; [policy] has no key like it, nor has a built-in policy.loss",
    "wm.q": "; it needs wm.loss = 'gce'",
    "critic.lr": "; it needs advantage.type = 'ppo'",
    "lora.alpha": "; it needs lora.rank",
}


def test_an_unknown_key_is_refused_with_what_was_meant(recipe):
    for misspelt, suggestion in MEANT.items():
        section, _, name = misspelt.rpartition(".")
        header = f"[{section}]\n" if section else ""
        path = recipe(f"{header}{name} = 1\n{MODEL}")
        assert problem(path) in (
            f"{path}: unknown key '{key}'{suggestion}" for key in (misspelt, section or misspelt)
        )
        message = problem(recipe(), {misspelt: "1"})
        assert (
            message.removeprefix("command line: unknown key '").replace("--", "")
            == f"{misspelt}'{suggestion}"
        )


def test_hints_name_keys_that_exist():
    keys = set(keys_of(Config, {})) | {
        key
        for section in Config.model_fields
        for _, keys_of_plugin in plugin_keys(section)
        for key in keys_of_plugin
    }
    sections = {key.rpartition(".")[0] for key in keys}
    for key in [*SYNONYMS, *filter(None, FORMER_KEYS.values())]:
        assert key in keys | sections
    assert not keys & set(FORMER_KEYS)
    assert hint("webshop.products", {}) == "; it is 'env.products' now"


def test_a_key_of_a_built_in_loss_names_the_loss(folder, monkeypatch):
    monkeypatch.setitem(plugins.BUILT_IN["losses"], "floored", "mine:token")
    monkeypatch.setattr(PolicyConfig, "CHOICES", (*PolicyConfig.CHOICES, "floored"))
    assert hint("policy.floor", {}) == "; policy.loss = 'floored' has it"


def test_a_choice_leaves_the_keys_of_the_one_before_it_behind(recipe):
    path = recipe(
        MODEL
        + '[advantage]\ntype = "gigpo"\nomega = 2.0\neps = 0.5\n[wm]\nrho = 0.3\nmax_tokens = 9\n'
    )
    config = load(path, {"advantage.type": "grpo", "wm.enabled": "False"})
    assert config.advantage.settings() == {"stat": "steps", "norm_std": True, "eps": 0.5}
    assert not config.wm.enabled
    assert config.wm.rho == 0.2
    assert config.wm.max_tokens == 9
    assert "omega" not in dump(config)
    assert "rho" not in dump(config)
    message = problem(path, {"advantage.type": "grpo", "advantage.omega": "2"})
    assert (
        message == "command line: unknown key '--advantage.omega'; advantage.type = 'gigpo' has it"
    )
    assert problem(path, {"wm.enabled": "false", "wm.rho": "0.1"}).endswith(
        "'wm.rho'; it needs wm.enabled = True"
    )


def test_a_choice_keeps_the_keys_that_mean_the_same_to_both(recipe):
    """Only keys with the same default are kept: GiGPO's gamma is per turn, PPO's per token."""
    gigpo_config = load(recipe(MODEL + '[advantage]\ntype = "gigpo"\nnorm_std = false\n'))
    assert gigpo_config.advantage.settings()["gamma"] == 0.95
    path = recipe(dump(gigpo_config), name="config")  # a run's configuration, which has every key
    assert load(path, {"advantage.type": "ppo"}).advantage.settings()["gamma"] == 1.0
    assert load(path, {"advantage.type": "grpo"}).advantage.settings()["norm_std"] is False

    path = recipe(MODEL + '[advantage]\ntype = "gigpo"\ngamma = 0.9\n')
    assert load(path, {"advantage.type": "ppo"}).advantage.settings()["gamma"] == 1.0
    assert load(path, {"advantage.omega": "2"}).advantage.settings()["gamma"] == 0.9
    config = load(path, {"advantage.type": "ppo", "advantage.gamma": "0.95"})
    assert config.advantage.settings()["gamma"] == 0.95


def test_a_choice_leaves_the_entries_of_tables_behind_too(recipe):
    path = recipe(
        MODEL + '[env]\nname = "openenv"\nurl = "http://a"\noptions = {difficulty = "hard"}\n'
    )
    assert load(path).env.options == {"difficulty": "hard"}
    assert load(path, {"env.name": "alfworld"}).env.name == "alfworld"
    config = load(path, {"env.name": "gymnasium", "env.kwargs": "{size = 5}"})
    assert config.env.kwargs == {"size": 5}


WRONG = [
    ("optim.lr", "-1", "optim.lr = -1: Input should be greater than 0"),
    ("optim.lr", "fast", "optim.lr = 'fast': Input should be a valid number"),
    ("optim.lr", "inf", "finite"),
    ("optim.lr", "{a = 1}", "valid number"),
    ("optim.lr", "1\nx = 2", "valid number"),
    ("optim.betas", "[0.9]", "optim.betas.1"),
    ("run.updates", "1.5", "valid integer"),
    ("run.name", "", "at least 1 character"),
    ("run.trackers", "wandbee", "'trackio' or 'mlflow'"),
    ("wm.enabled", "maybe", "valid boolean"),
    ("wm.alpha", "1.1", "less than or equal to 1"),
    ("wm.weight", "adaptiv", "'adaptive', or Input should be a valid number"),
    ("wm.loss", "l2", "there is no 'l2'"),
    ("env.kinds", '["pikc"]', "env.kinds.0 = 'pikc'"),
    ("rollout.group_size", "1", "rollout.group_size = 1 leaves grpo without a baseline"),
    ("eval.attempts", "0", "greater than or equal to 1"),
    ("run.log_episodes", "-1", "greater than or equal to 0"),
]


def test_a_wrong_value_is_named_with_its_origin(recipe):
    for key, text, reason in WRONG:
        message = problem(recipe(), {key: text})
        assert message.startswith(f"command line: {key}")
        assert reason in message
    path = recipe(MODEL + "[optim]\nlr = 0\n")
    assert problem(path) == f"{path}: optim.lr = 0: Input should be greater than 0"
    assert problem(path, {"optim.betas": "[0.9, 0.9]"}).startswith(str(path))


OVERRIDES = [
    ("optim.lr", "5e-4", 5e-4),
    ("optim.lr", "1", 1.0),
    ("run.seed", "-3", -3),
    ("wm.enabled", "False", False),
    ("env.kinds", '["pick", "look"]', ["pick", "look"]),
    ("run.trackers", "[]", []),
    ("run.trackers", "wandb", ["wandb"]),
    ("optim.betas", "[0.9, 0.99]", (0.9, 0.99)),
    ("env.style", '"compact"', "compact"),
    ("model.path", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
    ("model.path", "7", "7"),
    ("run.name", "2026-07-01", "2026-07-01"),
    ("run.dir", "out/x", Path("out/x")),
    ("wm.weight", "0.5", 0.5),
    ("wm.weight", "adaptive", "adaptive"),
    ("advantage.similarity", "none", None),
    ("env.data", "/games", Path("/games")),
    ("env.data", "none", None),
]


def test_overrides(recipe):
    path = recipe(
        MODEL
        + '[env]\ndata = "x"\n[advantage]\ntype = "gigpo"\nsimilarity = 0.5\n[optim]\nepochs = 2\n'
    )
    for key, text, expected in OVERRIDES:
        config = load(path, {key: text})
        section, _, field_name = key.partition(".")
        value = getattr(getattr(config, section), field_name)
        assert value == expected
        assert type(value) is type(expected)
        assert config.optim.epochs == 2


def test_malformed_recipes(recipe, tmp_path):
    for text, reason in (
        ("", "'model.path' is missing; set it in the recipe or with --model.path VALUE"),
        ("[model\n", "not valid TOML"),
        (MODEL + 'path = "y"\n', "not valid TOML"),
        ("\ufeff" + MODEL, "not valid TOML"),
        ("model = 3\n", "model = 3"),
    ):
        path = recipe(text)
        assert problem(path).startswith(f"{path}: ")
        assert reason in problem(path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "not valid TOML" in problem(tmp_path / "binary.toml")
    assert "optim = 3" in problem(recipe("optim = 3\n" + MODEL), {"optim.lr": "1"})
    assert "did you mean 'quickstart'?" in problem("quikstart")
    assert all(name in problem("zzzqqq") for name in recipe_names())
    assert problem("nowhere.toml") == "nowhere.toml: No such file or directory"


def test_a_table_takes_one_key_at_a_time_or_all(recipe):
    options = {
        "model.chat_template_kwargs.enable_thinking": "false",
        "model.chat_template_kwargs.effort": "low",
    }
    config = load(recipe(), options)
    assert config.model.chat_template_kwargs == {"enable_thinking": False, "effort": "low"}
    config = load(recipe(), {"model.chat_template_kwargs": "{enable_thinking = false}"})
    assert config.model.chat_template_kwargs == {"enable_thinking": False}
    assert "unknown key '--wm.rho.x'" in problem(recipe(), {"wm.rho.x": "1"})


def test_what_is_dumped_loads_to_the_same(recipe):
    config = load(
        "quickstart",
        {"run.dir": "a b/ü", "wm.weight": "0.25", "env.data": "/x", "optim.lr": "1e-7"},
    )
    assert load(recipe(dump(config))) == config
    with pytest.raises(ValueError, match="frozen"):
        config.optim.lr = 1.0  # type: ignore[misc]


def test_a_recipe_overrides_keys_of_its_bases_in_order(recipe, tmp_path):
    (tmp_path / "sub").mkdir()
    recipe("[optim]\nlr = 1e-3\nepochs = 2\n", "sub/old")
    recipe('base = "old.toml"\n[optim]\nlr = 2e-3\n[wm]\nrho = 0.5\n', "sub/middle")
    path = recipe('base = ["qwen2.5-7b", "sub/middle.toml"]\n[wm]\nalpha = 0.5\n')
    config = load(path, {"wm.rho": "0.3"})
    assert config.optim.lr == 2e-3
    assert config.optim.epochs == 2
    assert config.wm.rho == 0.3
    assert config.wm.alpha == 0.5
    assert config.model.path == "Qwen/Qwen2.5-7B-Instruct"
    assert config == load(recipe(dump(config)))
    assert "\nbase" not in dump(config)


def test_a_base_that_cannot_be(recipe):
    recipe('base = "mine.toml"\n', "other")
    for base_recipe, reason in (
        ('"quikstart"', "mine.toml: base: unknown recipe 'quikstart': did you mean 'quickstart'?"),
        ('"absent.toml"', "absent.toml: No such file"),
        ('"mine.toml"', "mine.toml: base: 'mine.toml' is itself built on this recipe"),
        (
            '["quickstart", "other.toml"]',
            "other.toml: base: 'mine.toml' is itself built on this recipe",
        ),
        (
            '["quickstart", 3]',
            "base = ['quickstart', 3]; it must be the name of a recipe, the path of a .toml file",
        ),
    ):
        assert reason in problem(recipe(f"base = {base_recipe}\n{MODEL}"))


def test_a_wrong_value_names_the_file_it_is_in(recipe):
    base_recipe = recipe("[wm]\nrho = 2\nalpah = 1\n[lora]\nrank = 1\n", "old")
    path = recipe(f'base = "old.toml"\n{MODEL}')
    assert problem(path, {"wm.rho": "1"}).startswith(
        f"{base_recipe}: unknown key 'wm.alpah'; did you mean"
    )
    recipe('[wm]\nrho = 2\n[lora]\nrank = 1\n[advantage]\ntype = "ppo"\n', "old")
    assert problem(path).startswith(f"{base_recipe}: wm.rho = 2: ")
    assert problem(path, {"wm.rho": "3"}).startswith("command line: wm.rho = 3: ")
    assert problem(path, {"wm.rho": "1"}).startswith(f"{base_recipe}: lora.rank with")


# --- plug-ins

PLUGINS = """
import math
from paw.config import EnvConfig, Section

class Cave:
    class Config(Section):
        depth: int = 3

class Maze:
    class Config(EnvConfig):
        depth: int = 3
        \"\"\"How deep it is.\"\"\"

def best(samples, *, width: int, scale: float = 2.0):
    '''Widest first.

    Args:
        width: how far it looks
    '''

def token(logp, entropy, batch, *, floor: float = 0.0): ...

class Listed:
    Config = ["depth"]

def untyped(samples, *, depth=3): ...
def odd(samples, *, depth: "Nonesuch" = 3): ...
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder. It contains mine.py, importable as a file and as a module."""
    (tmp_path / "mine.py").write_text(PLUGINS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_plug_in_of_ones_own_brings_its_keys(recipe, folder):
    chosen = {
        "env.name": "mine.py:Maze",
        "advantage.type": "mine.py:best",
        "policy.loss": "mine.py:token",
    }
    chosen |= {"advantage.width": "2"}
    config = load(recipe(), chosen | {"env.depth": "4", "policy.floor": "2", "env.max_turns": "7"})
    assert [part.settings() for part in (config.env, config.advantage, config.policy)] == [
        {"depth": 4}, {"width": 2, "scale": 2.0}, {"floor": 2.0}
    ]  # fmt: skip
    assert load(recipe(dump(config))) == config
    for key, text, message in (
        ("env.dept", "4", "unknown key '--env.dept'; did you mean 'env.depth'?"),
        ("env.depth", "deep", "env.depth = 'deep': Input should"),
        ("env.goals", "human", "unknown key '--env.goals'; env.name = 'webshop' has it"),
        (
            "env.name",
            "mine.py:Mase",
            "env.name = 'mine.py:Mase': the file has no 'Mase'; did you mean 'Maze'?",
        ),
    ):
        assert problem(recipe(), chosen | {key: text}).startswith(f"command line: {message}")


def test_each_kind_of_name(folder, monkeypatch):
    from paw.algo.advantages import gigpo

    assert plugins.load("advantages", "gigpo") is gigpo
    for name in ("mine.py:Maze", f"{folder}/mine.py:Maze", "mine:Maze"):
        assert plugins.load("envs", name).__name__ == "Maze"
    assert plugins.load("envs", "mine.py:Maze.Config").__name__ == "Config"
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [EntryPoint("maze", "mine:Maze", group)]
    )
    plugins._registered.cache_clear()
    try:
        assert plugins.load("rewards", "maze").__name__ == "Maze"
        assert plugins.names("rewards") == ["judge", "maze"]
    finally:
        plugins._registered.cache_clear()

    first = plugins.load("envs", "mine.py:Maze")
    assert plugins.load("envs", "mine.py:Maze") is first  # read again only after a change
    (folder / "mine.py").write_text("Maze = 5  # shorter\n")
    assert plugins.load("envs", "mine.py:Maze") == 5


def test_what_a_class_is_made_with():
    """A class gets its section if it has settings, even if it can do without, or if it needs an
    argument."""

    class Needs:
        def __init__(self, config, depth=3):
            self.config = config

    class May(Needs):
        class Config(Section):
            depth: int = 3

        def __init__(self, config=None):
            self.config = config

    class Takes(May):
        def __init__(self, *args):
            (self.config,) = args

    class Alone(Needs):
        def __init__(self, depth=3):
            self.config = depth

    assert [plugins.make(kind, "section").config for kind in (Needs, May, Takes, Alone)] == [
        "section"
    ] * 3 + [3]


def test_an_object_that_cannot_be_called_is_one_line(recipe):
    name = plugins.give([1])
    expected = f"'{name}' is a list, not a function or class"
    assert expected in problem(recipe(), {"policy.loss": name})


MISNAMED = [
    (
        "advantages",
        "gigop",
        "there is no 'gigop': did you mean 'gigpo'? (or give 'module:name' or 'FILE.py:name')",
    ),
    (
        "envs",
        "zzz",
        "there is no 'zzz': there are: alfworld, gymnasium, next_state, openenv, questions, search, tasks, tau2",
    ),
    ("envs", "mine.py:Mase", "'mine.py:Mase': the file has no 'Mase'; did you mean 'Maze'?"),
    ("envs", "mine:Mase", "'mine:Mase': the module has no 'Mase'; did you mean 'Maze'?"),
    ("envs", ":Maze", "':Maze': the module cannot be imported: ValueError: Empty module name"),
    ("envs", "mime.py:Maze", "'mime.py:Maze': there is no file /"),
    (
        "envs",
        "mine.maze:Maze",
        "'mine.maze:Maze': the module cannot be imported: ModuleNotFoundError: ",
    ),
    ("envs", "broken.py:Maze", "broken.py, line 2: ZeroDivisionError: division by zero"),
    (
        "envs",
        "needs:Maze",
        "'needs:Maze': the module cannot be imported: ModuleNotFoundError: No module named 'no",
    ),
    (
        "envs",
        "given:gone",
        "'given:gone' was passed by a program; run that program again, or name a 'FILE",
    ),
]


def test_a_wrong_name_says_what_is_wrong(folder):
    (folder / "broken.py").write_text("x = 0\n1 / x\n")
    (folder / "needs.py").write_text("import nonesuch\n")
    for kind, name, message in MISNAMED:
        with pytest.raises(UserError) as caught:
            plugins.load(kind, name)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_settings_have_descriptions_and_types(folder):
    maze_settings = plugins.settings(plugins.load("envs", "mine.py:Maze"), "maze", EnvConfig)
    assert maze_settings.model_fields["depth"].description == "How deep it is."
    cave_settings = plugins.settings(plugins.load("envs", "mine.py:Cave"), "cave", EnvConfig)
    settings_made = cave_settings.model_validate({"depth": 4, "max_turns": 7}).model_dump()
    assert issubclass(cave_settings, EnvConfig)
    assert settings_made["depth"] == 4
    assert settings_made["max_turns"] == 7
    best_settings = plugins.settings(plugins.load("advantages", "mine.py:best"), "best")
    assert best_settings.model_fields["width"].is_required()
    assert best_settings.model_fields["width"].description == "how far it looks"
    assert plugins.settings(len, "len") is Section
    for name, message in (
        ("Listed", "'Listed': Listed.Config must be a subclass of paw.config.Section"),
        (
            "untyped",
            "'untyped': the parameter 'depth' is a setting, and needs a type: depth: float = 1.0",
        ),
        (
            "odd",
            "'odd': its keyword-only parameters cannot be settings: name 'Nonesuch' is not defined",
        ),
    ):
        with pytest.raises(UserError) as caught:
            plugins.settings(plugins.load("envs", f"mine.py:{name}"), name)
        assert str(caught.value) == message


def test_nothing_is_imported_that_was_not_asked_for():
    program = (
        "import sys, paw.config.plugins as p; p.names('envs'); p.load('advantages', 'grpo');"
        "sys.exit(any(m == 'torch' or m.startswith(('paw.envs', 'paw.agents')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_program_hands_over_what_it_made():
    def ours(samples, *, depth: int = 3):
        return [0.0] * len(samples)

    config = load("quickstart", {"advantage.type": ours, "advantage.depth": 5})
    assert plugins.load("advantages", config.advantage.type) is ours
    assert config.advantage.settings() == {"depth": 5}
    assert plugins.give(ours) == config.advantage.type != plugins.give(lambda samples: [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine.type": "server"}, "needs either engine.urls"),
        (
            {"engine.type": "server", "engine.urls": "http://a:1", "engine.servers": "1"},
            "needs either engine.urls",
        ),
        (
            {"policy.importance_mask": "[2, 1]"},
            r"policy.importance_mask = [2.0, 1.0]: it must be [low, high] with low < high",
        ),
        (
            {"policy.importance_mask": "[0.5, 2]", "policy.old_logp": "engine"},
            "need policy.old_logp = 'trainer'",
        ),
        ({"policy.importance_level": "response"}, "policy.tis_cap and policy.importance_mask"),
        (
            {"policy.loss": "gspo", "policy.old_logp": "engine", "policy.tis_cap": "2"},
            "policy.tis_cap and policy.loss = 'gspo' need policy.old_logp = 'trainer'",
        ),
        (
            {"policy.loss": "math:exp", "policy.old_logp": "engine", "policy.tis_cap": "2"},
            "policy.tis_cap and policy.loss = 'math:exp' need policy.old_logp = 'trainer'",
        ),
        ({"policy.loss": "gspo", "policy.dual_clip": "2"}, "it needs policy.loss = 'ppo'"),
        ({"rollout.ahead": "1"}, "it needs engine.type = 'server'"),
        (
            {"advantage.type": "ppo", "advantage.penalty_only": "drop"},
            "command line: unknown key 'advantage.penalty_only'; it needs advantage.type != 'ppo'",
        ),
    ],
)
def test_settings_that_would_do_nothing_or_harm(changes, message):
    assert message in problem("quickstart", changes)


def test_ppo_has_no_groups_whose_penalties_could_be_dropped(recipe):
    """A recipe must not set both. A recipe that sets one drops the other that its base sets."""
    path = recipe(MODEL + '[advantage]\ntype = "ppo"\npenalty_only = "drop"\n')
    assert (
        problem(path)
        == f"{path}: unknown key 'advantage.penalty_only'; it needs advantage.type != 'ppo'"
    )
    path = recipe('base = ["own-environment", "ppo"]\n[env]\nname = "alfworld"\n')
    for chosen in (load(path), load("quickstart", {"advantage.type": "ppo"})):
        assert chosen.advantage.type == "ppo"
        assert chosen.advantage.penalty_only == "keep"
    assert load("quickstart").advantage.penalty_only == "drop"


ESTIMATORS = """
from paw.config import estimator


def compares(samples):
    return [0.0 for _ in samples]


@estimator(needs="nothing")
def alone(samples, *, scale: float = 1.0):
    return [scale for _ in samples]


@estimator(needs="critic")
def judged(values, score, *, gamma: float = 1.0):
    return [score - value for value in values]
"""


def test_an_estimator_of_one_s_own_declares_what_it_needs(tmp_path):
    (tmp_path / "own.py").write_text(ESTIMATORS)

    def changes(name, **others):
        return {"advantage.type": f"{tmp_path / 'own.py'}:{name}", **others}

    single = {"rollout.group_size": "1"}
    assert "without a baseline" in problem("quickstart", changes("compares", **single))
    for name in ("alone", "judged"):
        chosen = load("quickstart", changes(name, **single))
        assert chosen.rollout.group_size == 1
        assert chosen.advantage.penalty_only == "keep"
        for key, value in (("advantage.penalty_only", "drop"), ("rollout.refill", "1")):
            message = problem("quickstart", changes(name, **{key: value}))
            assert message.endswith(f"'{key}'; it needs advantage.type != 'ppo'")

    refilled = load("quickstart", changes("compares", **{"rollout.refill": "1"}))
    assert refilled.rollout.refill == 1
    assert refilled.advantage.penalty_only == "drop"
    critic = {"critic.lr": "1e-3"}
    assert load("quickstart", changes("judged", **critic)).critic.lr == 1e-3
    assert problem("quickstart", changes("alone", **critic)).endswith(
        "'critic.lr'; it needs advantage.type = 'ppo'"
    )
    assert "the critic trains every weight" in problem(
        "quickstart", changes("judged", **{"lora.rank": "8"})
    )


def test_one_server_is_a_list_of_one():
    assert load(
        "quickstart", {"engine.type": "server", "engine.urls": "http://a:1"}
    ).engine.urls == ["http://a:1"]


def test_a_loss_has_its_own_clip_and_not_the_one_of_another_loss(recipe, tmp_path):
    """The quickstart's clip_high is for ppo. Keys that one layer sets together stay together."""

    def clip(*layers):
        policy = load(*layers).policy
        return policy.clip_low, policy.clip_high

    assert clip("quickstart") == (0.2, 0.28)
    for loss, own in {"cispo": (1.0, 0.28), "gspo": (3e-4, 4e-4), "ppo": (0.2, 0.28)}.items():
        config = load("quickstart", {"policy.loss": loss})
        assert (config.policy.clip_low, config.policy.clip_high) == own
        assert not warnings(config)
        assert load(recipe(dump(config), loss)) == config
    path = recipe('base = "quickstart"\n[policy]\nloss = "gspo"\nclip_high = 1e-3\n')
    assert clip(path) == (3e-4, 1e-3)
    assert clip(path, {"policy.loss": "ppo"}) == (0.2, 0.2)
    assert clip(path, {"policy.clip_high": "2e-3"}) == (3e-4, 2e-3)

    path = recipe('base = ["gspo", "quickstart"]\n'.replace('"gspo"', f'"{path}"'), "turned")
    (line,) = warnings(load(path))
    assert line.startswith("warning: policy.clip_high = 0.28 seems to be written for another loss")
    assert line.endswith("the default of policy.loss = 'gspo' is 0.0004")

    (tmp_path / "own.py").write_text(
        "def plain(logp, entropy, batch):\n    return -batch.advantage * logp\n\n\n"
        "def own_clip(logp, entropy, batch, *, clip_high: float = 3.0):\n    return logp\n"
    )
    plain_loss = f"{tmp_path / 'own.py'}:plain"
    assert "clip_high" not in dump(load("quickstart", {"policy.loss": plain_loss}))
    message = problem("quickstart", {"policy.loss": plain_loss, "policy.clip_high": "0.1"})
    assert message.endswith("'policy.clip_high'; it needs policy.loss = 'ppo' or 'cispo' or 'gspo'")
    own_clip = load("quickstart", {"policy.loss": f"{tmp_path / 'own.py'}:own_clip"})
    assert own_clip.policy.clip_high == 3.0


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize(
    ("key", "value"), [("clip_low", "-0.5"), ("clip_low", "7"), ("clip_high", "-2")]
)
def test_a_clip_that_is_out_of_range_is_refused_by_every_loss(loss, key, value):
    with pytest.raises(UserError, match=f"policy.{key} = {value}"):
        load("quickstart", {"policy.loss": loss, f"policy.{key}": value})
