"""Files and values of whatever content: each is taken, or refused with one line that is short enough to read."""

import json
import os
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paw.cli import main
from paw.errors import UserError, clean
from paw.recipe import dump, known_keys, load, validate
from paw.state import checkpoint, restore
from paw.state.claim import claim
from paw.state.log import MetricsLog
from paw.state.resume import changes
from paw.tools.postmortem import examine, tell
from paw.tools.report import write_report

pytestmark = pytest.mark.slow

fuzz = settings(derandomize=True, max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
LIMIT = 5000
"""Characters of a message before the terminal's own limit cuts it."""
ODD = [
    "\0", "a\nb", "\ud800", "../x", "/etc", "..", ".", "", "x" * 100_000, "9" * 5000, "1e999", "[" * 3000, "[[[",
    "{a = 1}", "none", "true", "-1", "1" * 4000, "'", '"', "nan", "1979-05-27", "\\", "\x1b[2J",
]  # fmt: skip
TEXTS = st.one_of(st.text(max_size=30), st.sampled_from(ODD))
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, -(10**4000), 2**63, 2**31, 1e308, -0.0]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
KEYS = st.sampled_from(sorted(known_keys(load("quickstart"))))


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def told(error: UserError) -> None:
    """The message is one line that can be read."""
    message = str(error)
    assert len(message) < LIMIT, message[:300]
    assert "Traceback" not in message and clean(message, LIMIT)


# --- configuration -------------------------------------------------------------------------------------------------


@fuzz
@given(key=KEYS, text=TEXTS)
def test_any_word_for_any_key(key, text):
    with suppress(UserError):
        try:
            config = load("quickstart", {key: text})
        except UserError as error:
            told(error)
            raise
        assert validate(tomllib.loads(dump(config)), origin="dump") == config


@fuzz
@given(key=KEYS, value=st.one_of(VALUES, st.just(deep(500))))
def test_any_value_for_any_key(key, value):
    section, leaf = key.split(".")
    tree: dict[str, Any] = {"model": {"path": "m"}}
    tree.setdefault(section, {})[leaf] = value
    try:
        config = validate(tree, origin="a recipe")
    except UserError as error:
        told(error)
    else:
        assert dump(config)


@fuzz
@given(
    tree=st.dictionaries(st.one_of(TEXTS, st.sampled_from(["model", "run", "optim"])), VALUES, max_size=3),
    content=st.one_of(st.binary(max_size=60), TEXTS.map(lambda text: text.encode(errors="surrogatepass"))),
)
def test_any_tree_and_any_recipe_file(tree, content):
    with pytest.raises(UserError) as error:  # model.path is missing, at least
        validate(tree, origin="a recipe")
    told(error.value)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            load(path)
        told(error.value)


MODEL = '\n[model]\npath = "m"'
DOCUMENTS = [
    ("[run]\nupdates = " + "9" * 5000, "not valid TOML"),
    ("[run]\nupdates = " + "9" * 4000 + MODEL, "less than 2147483648"),
    ("a = " + "[" * 20_000 + "]" * 20_000, "not valid TOML"),
    ("a" + ".a" * 3000 + " = 1" + MODEL, "unknown key 'a'"),
    ("x" * 100_000 + " = 1" + MODEL, "unknown key 'xxx"),
    ('[model]\npath = "a\\u0000b"', "it holds NUL"),
    ("\0", "not valid TOML"),
    ('[model]\npath = "' + "a" * 100_000 + '"', "100,000 characters are too many"),
    ('[env]\ndata = "/tmp/' + "a" * 300 + '"' + MODEL, "more than 255 bytes"),
    ('[run]\nname = "../x"' + MODEL, "run.name = '../x': a folder's name"),
    ('[run]\nname = "/x"' + MODEL, "run.name = '/x': a folder's name"),
    ('[run]\nname = "a\\nb"' + MODEL, "a folder's name"),
    ('[run]\nname = "."' + MODEL, "a folder's name"),
    ("#" * 2_000_000, "more than 1,000,000 bytes"),
    ("[lora]\ntargets = " + "[" * 90 + "]" * 90 + MODEL, "lora.targets"),
]


def test_a_recipe_that_goes_too_far_is_one_line(capfd, tmp_path):
    path = tmp_path / "recipe.toml"
    for content, message in DOCUMENTS:
        path.write_text(content)
        assert main(["train", str(path), "--run.dir", str(tmp_path / "runs")]) == 2
        said = capfd.readouterr().err
        assert said.startswith("paw: ") and said.count("\n") == 1 and len(said) < 2200 and message in said
        assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.toml"]


def test_a_thousand_bases_are_one_line(tmp_path):
    for number in range(1500):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    (tmp_path / "1500.toml").write_text('[model]\npath = "m"\n')
    with pytest.raises(UserError, match="built on more than 50 recipes"):
        load(tmp_path / "0.toml")
    assert load(tmp_path / "1451.toml").model.path == "m"


LONG = "x" * 5000
COMMANDS = [
    ["train", LONG], ["train", f"{LONG}.toml"], ["report", LONG], ["report", "a/" * 3000], ["doctor", "--run", LONG],
    ["export", LONG], ["eval", LONG], ["warmup", LONG], ["eval", LONG, "--recipe", "quickstart"],
    ["experiment", "compare", LONG], ["data", "alfworld", LONG], [LONG],
]  # fmt: skip
OVERRIDES = [
    ("run.name", LONG), ("run.name", "../x"), ("run.name", "\udcff"), ("run.dir", LONG), ("run.dir", "a/" * 3000),
    ("env.data", LONG), ("model.path", LONG), ("run.seed", "9" * 5000), ("run.updates", "9" * 4000),
    ("optim.betas", "[" * 5000), (f"{LONG}.x", "1"),
]  # fmt: skip


def test_a_word_that_goes_too_far_is_one_line(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in [*COMMANDS, *(["train", "quickstart", f"--{key}", value] for key, value in OVERRIDES)]:
        assert main(words) == 2
        said = capfd.readouterr().err.splitlines()
        assert said[-1].startswith("paw: ") and len(said) <= 2 and all(len(line) < 2200 for line in said)
    assert list(tmp_path.iterdir()) == []


# --- files of a run ------------------------------------------------------------------------------------------------

RECORDS = st.dictionaries(st.sampled_from(["step", "eval/success", "reward/mean", "a"]), VALUES)
ODD_LINES = [b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}", b'{"step": 1, "reward/mean": 1e999}', b'{"step": NaN}']
JSON = st.one_of(VALUES, RECORDS).map(lambda value: json.dumps(value).encode())
LINES = st.one_of(JSON, st.binary(max_size=40), st.sampled_from(ODD_LINES))


@fuzz
@given(lines=st.lists(LINES, max_size=6), torn=st.booleans())
def test_any_metrics_file(lines, torn):
    content = b'{"step": 0, "eval/success": 0.5}\n' + b"\n".join(lines) + (b"" if torn else b"\n")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for name in ("metrics.jsonl", "samples.jsonl"):
            (run / name).write_bytes(content)
        tell(examine(run))
        with MetricsLog(run, resume_step=3) as log:
            assert log.history[0] == {"step": 0, "eval/success": 0.5}
            assert all(type(record["step"]) is int and record["step"] <= 3 for record in log.history)
            log.log(4, {"reward/mean": 0.5})
        kept = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        assert kept[-1] == {"step": 4, "reward/mean": 0.5}
        for line in log.lost:
            assert "\n" not in line


INFO = st.dictionaries(
    st.sampled_from(["wall_s", "start", "ended", "resumed", "ranks", "started", "paw", "device", "parameters"]),
    st.one_of(VALUES, st.dictionaries(st.sampled_from(["how", "why", "at"]), VALUES)),
)
ODD_CONFIGS = ["[run]\nseed = " + seed for seed in ("9" * 5000, "[" * 5000, "9" * 4000, "5")]
CONFIGS = st.one_of(TEXTS, st.sampled_from([*ODD_CONFIGS, "[run]\nname = 3", "run = 1", "[run.seed]\na = 1"]))


@fuzz
@given(info=INFO, config=CONFIGS)
def test_any_run_json_and_config(info, config):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "metrics.jsonl").write_text('{"step": 0, "eval/success": 0.5}\n')
        (run / "run.json").write_text(json.dumps(info))
        (run / "config.toml").write_text(config, errors="replace")
        assert all(len(line) < LIMIT and "\n" not in line for line in tell(examine(run)))
        now = validate({"model": {"path": "m"}}, origin="x")
        try:
            assert all(len(line) < LIMIT and "\n" not in line for line in changes(run, now))
        except UserError as error:
            told(error)


@settings(fuzz, max_examples=8)
@given(lines=st.lists(LINES, max_size=6), info=INFO, config=CONFIGS)
def test_a_report_of_any_files(lines, info, config):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for name in ("metrics.jsonl", "samples.jsonl"):
            (run / name).write_bytes(b'{"step": 0, "eval/success": 0.5}\n' + b"\n".join(lines))
        (run / "run.json").write_text(json.dumps(info))
        (run / "config.toml").write_text(config, errors="replace")
        assert write_report(run).is_file()


@fuzz
@given(body=st.one_of(VALUES, st.fixed_dictionaries({"files": VALUES, "order": VALUES})), state=VALUES)
def test_any_manifest_and_state(body, state):
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            (Path(folder) / f"step_{step:06d}").mkdir()
        good = checkpoint.save(Path(folder), 1, {}, {})
        bad = Path(folder) / "step_000002"
        (bad / "state.json").write_text(json.dumps(state))
        signed = checkpoint.manifest_text({"state.json": checkpoint.digest(bad / "state.json")}, 2)
        for manifest in (json.dumps(body), signed):
            (bad / "manifest.json").write_text(manifest)
            warned: list[str] = []
            assert restore.newest(Path(folder), warn=warned.append)[0] == good
            assert len(warned) == 1 and len(warned[0]) < LIMIT and "\n" not in warned[0]


def test_a_pipe_in_place_of_a_runs_file_keeps_nobody_waiting(tmp_path):
    for name in ("metrics.jsonl", "samples.jsonl", "config.toml", "run.json", ".lock"):
        run = tmp_path / name.strip(".")
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"step": 0, "eval/success": 0.5}\n')
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        with suppress(UserError):
            tell(examine(run))
        with suppress(UserError):
            write_report(run)
        config = validate({"model": {"path": "m"}, "run": {"dir": str(tmp_path), "name": run.name}}, origin="x")
        with suppress(UserError):
            claim(config, resume="auto", numbered=False)[1].close()
            changes(run, config)
            MetricsLog(run, resume_step=0).__exit__()
