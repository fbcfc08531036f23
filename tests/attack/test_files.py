"""Files and values with any content are taken, or refused with one line that is short enough to
read."""

import hashlib
import json
import os
import tempfile
import tomllib
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonl import read_jsonl

from paw.checkpoint import files as checkpoint
from paw.checkpoint import restore
from paw.cli import main
from paw.config.recipe import dump, known_keys, load, validate
from paw.errors import UserError, clean
from paw.rundir.log import open_log
from paw.rundir.resume import changes
from paw.rundir.run_lock import take_run_directory
from paw.tools.report.report import write_report

pytestmark = pytest.mark.slow

fuzz = settings(
    derandomize=True, max_examples=60, deadline=None, suppress_health_check=list(HealthCheck)
)
LIMIT = 5000
"""Characters of a message before the terminal's own limit cuts it."""
ODD = [
    "\0", "a\nb", "\ud800", "../x", "/etc", "..", ".", "", "x" * 100_000, "9" * 5000, "1e999", "[" * 3000, "[[[",
    "{a = 1}", "none", "true", "-1", "1" * 4000, "'", '"', "nan", "1979-05-27", "\\", "\x1b[2J",
]  # fmt: skip
TEXTS = st.one_of(st.text(max_size=30), st.sampled_from(ODD))
NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([10**400, -(10**4000), 2**63, 2**31, 1e308, -0.0])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
DEEP = json.loads("[" * 500 + "]" * 500)
KEYS = st.sampled_from(sorted(known_keys(load("quickstart"))))


@contextmanager
def told_if_refused(*, always: bool = False):
    """What is refused is refused in one line that can be read. With `always` it must be refused."""
    try:
        yield
    except UserError as error:
        message = str(error)
        assert len(message) < LIMIT, message[:300]
        assert "Traceback" not in message, message[:300]
        assert clean(message, LIMIT), message[:300]
    else:
        assert not always


def lines_are_short(lines):
    assert all(len(line) < LIMIT and "\n" not in line for line in lines)


# --- configuration


@settings(fuzz, max_examples=60)
@given(
    key=KEYS,
    value=st.one_of(TEXTS, VALUES, st.just(DEEP)),
    tree=st.dictionaries(
        st.one_of(TEXTS, st.sampled_from(["model", "run", "optim"])), VALUES, max_size=3
    ),
    content=st.one_of(
        st.binary(max_size=60), TEXTS.map(lambda text: text.encode(errors="surrogatepass"))
    ),
)
def test_any_value_any_tree_and_any_recipe_file(key, value, tree, content):
    with told_if_refused():
        config = load("quickstart", {key: value})
        assert validate(tomllib.loads(dump(config)), origin="dump") == config
    with told_if_refused(always=True):  # model.path is missing, at least
        validate(tree, origin="a recipe")
    with tempfile.TemporaryDirectory() as folder, told_if_refused(always=True):
        path = Path(folder) / "recipe.toml"
        path.write_bytes(content)
        load(path)


MODEL = '\n[model]\npath = "m"'
DOCUMENTS = [
    ("[run]\nupdates = " + "9" * 5000, "not valid TOML"),
    ("[run]\nupdates = " + "9" * 4000 + MODEL, "less than 2147483648"),
    ("a = " + "[" * 20_000 + "]" * 20_000, "not valid TOML"),
    ("\0", "not valid TOML"),
    ("a" + ".a" * 3000 + " = 1" + MODEL, "unknown key 'a'"),
    ("x" * 100_000 + " = 1" + MODEL, "unknown key 'xxx"),
    ('[model]\npath = "a\\u0000b"', "it contains NUL"),
    ('[model]\npath = "' + "a" * 100_000 + '"', "100,000 characters are too many"),
    ('[env]\ndata = "/tmp/' + "a" * 300 + '"' + MODEL, "more than 255 bytes"),
    ('[run]\nname = "../x"' + MODEL, "run.name = '../x': a folder's name"),
    ('[run]\nname = "/x"' + MODEL, "run.name = '/x': a folder's name"),
    ('[run]\nname = "."' + MODEL, "a folder's name"),
    ('[run]\nname = "a\\nb"' + MODEL, "a folder's name"),
    ("#" * 2_000_000, "more than 1,000,000 bytes"),
    ("[lora]\ntargets = " + "[" * 90 + "]" * 90 + MODEL, "lora.targets"),
]


def test_a_recipe_that_goes_too_far_is_one_line(capfd, tmp_path):
    path = tmp_path / "recipe.toml"
    for content, message in DOCUMENTS:
        path.write_text(content)
        assert main(["train", str(path), "--run.dir", str(tmp_path / "runs")]) == 2
        errors = capfd.readouterr().err
        assert errors.startswith("paw: ")
        assert errors.count("\n") == 1
        assert len(errors) < 2200
        assert message in errors
        assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.toml"]
    for number in range(60):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    (tmp_path / "60.toml").write_text('[model]\npath = "m"\n')
    with pytest.raises(UserError, match="its chain of bases has more than 50 recipes"):
        load(tmp_path / "0.toml")
    assert load(tmp_path / "11.toml").model.path == "m"


def test_a_recipe_on_too_many_recipes_names_their_limit(tmp_path):
    (tmp_path / "leaf.toml").write_text('[model]\npath = "m"\n')
    for name, base in (("few", "leaf"), ("many", "few")):
        bases = ", ".join([f'"{base}.toml"'] * 25)
        (tmp_path / f"{name}.toml").write_text(f"base = [{bases}]\n")
    with pytest.raises(
        UserError, match=r"many\.toml: it is built on more than 500 recipes in total"
    ):
        load(tmp_path / "many.toml")


LONG = "x" * 5000
COMMANDS = [
    ["train", LONG], ["train", f"{LONG}.toml"], ["report", LONG], ["report", "a/" * 3000],
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
    overrides = [["train", "quickstart", f"--{key}", value] for key, value in OVERRIDES]
    for command in COMMANDS + overrides:
        assert main(command) == 2
        errors = capfd.readouterr().err.splitlines()
        assert errors[-1].startswith("paw: ")
        assert len(errors) <= 2
        assert all(len(line) < 2200 for line in errors)
    assert list(tmp_path.iterdir()) == []


# --- files of a run

RECORDS = st.dictionaries(st.sampled_from(["step", "eval/success", "reward/mean", "a"]), VALUES)
ODD_LINES = [
    b"[" * 100_000,
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": 1, "reward/mean": 1e999}',
    b'{"step": NaN}',
]
JSON = st.one_of(VALUES, RECORDS).map(lambda value: json.dumps(value).encode())
INFO = st.dictionaries(
    st.sampled_from(
        ["wall_s", "start", "ended", "resumed", "ranks", "started", "paw", "device", "parameters"]
    ),
    st.one_of(VALUES, st.dictionaries(st.sampled_from(["how", "why", "at"]), VALUES)),
)
ODD_CONFIGS = ["[run]\nseed = " + seed for seed in ("9" * 5000, "[" * 5000, "9" * 4000, "5")]
FIRST = {"step": 0, "eval/success": 0.5}


@st.composite
def runs(draw):
    """The files of a run's directory, each with any content."""
    any_line = st.one_of(JSON, st.binary(max_size=40), st.sampled_from(ODD_LINES))
    lines = draw(st.lists(any_line, max_size=6))
    end = draw(st.sampled_from([b"", b"\n"]))
    log = json.dumps(FIRST).encode() + b"\n" + b"\n".join(lines) + end
    configs = [*ODD_CONFIGS, "[run]\nname = 3", "run = 1", "[run.seed]\na = 1"]
    config = draw(st.one_of(TEXTS, st.sampled_from(configs))).encode(errors="replace")
    info = json.dumps(draw(INFO)).encode()
    return {"metrics.jsonl": log, "samples.jsonl": log, "run.json": info, "config.toml": config}


def write(folder: str, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (Path(folder) / name).write_bytes(content)
    return Path(folder)


@fuzz
@given(files=runs())
def test_a_run_with_files_of_any_content_goes_on(files):
    with tempfile.TemporaryDirectory() as folder:
        run = write(folder, files)
        with told_if_refused():
            lines_are_short(changes(run, validate({"model": {"path": "m"}}, origin="x")))
        with open_log(run, resume_step=3) as log:
            assert log.history[0] == FIRST
            for record in log.history:
                assert type(record["step"]) is int
                assert record["step"] <= 3
            log.log(4, {"reward/mean": 0.5})
            lines_are_short(log.lost)
        assert read_jsonl(run / "metrics.jsonl")[-1] == {"step": 4, "reward/mean": 0.5}


@settings(fuzz, max_examples=8)
@given(files=runs())
def test_a_report_of_any_files(files):
    with tempfile.TemporaryDirectory() as folder:
        assert write_report(write(folder, files)).is_file()


ENTRY = st.one_of(VALUES, st.fixed_dictionaries({"bytes": VALUES, "sha256": VALUES}))
FILES = st.one_of(
    VALUES, st.dictionaries(st.sampled_from(["state.json", "model.safetensors"]), ENTRY)
)
ORDERS = st.one_of(VALUES, st.just(2))
STATE = st.fixed_dictionaries(
    {"version": st.one_of(VALUES, st.just(checkpoint.VERSION)), "step": VALUES}
)
STATES = st.one_of(st.one_of(STATE, VALUES).map(json.dumps), TEXTS)


def fits(state: str) -> bool:
    """Whether a state, which is JSON, is one of a checkpoint."""
    values = json.loads(state)
    if values["version"] not in (checkpoint.VERSION, checkpoint.SHARDED):
        return False
    return type(values["step"]) is int and 0 <= values["step"] < 2**53


@fuzz
@given(
    body=st.one_of(VALUES, st.fixed_dictionaries({"files": FILES, "order": ORDERS})), state=STATES
)
def test_any_manifest_and_state(body, state):
    """A checkpoint whose manifest or state is nonsense, though the digests agree, is passed over
    with one line."""
    with tempfile.TemporaryDirectory() as folder:
        good = checkpoint.save(Path(folder), 1, {}, {})
        bad = checkpoint.save(Path(folder), 2, {}, {})
        (bad / "state.json").write_text(state, errors="replace")
        if isinstance(body, dict):
            body |= {
                "sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
            }
        signed = checkpoint.manifest_text({"state.json": checkpoint.digest(bad / "state.json")}, 2)
        for manifest in (json.dumps(body, indent=1, sort_keys=True) + "\n", signed):
            (bad / "manifest.json").write_text(manifest)
            warnings: list[str] = []
            used, _ = restore.read_newest(Path(folder), warn=warnings.append)
            if used != good or len(warnings) != 1:
                assert manifest == signed
                assert fits(state)
            lines_are_short(warnings)


def test_a_pipe_in_place_of_a_runs_file_makes_nobody_wait(tmp_path):
    for name in ("metrics.jsonl", "samples.jsonl", "config.toml", "run.json", ".lock"):
        run = tmp_path / name.strip(".")
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"step": 0, "eval/success": 0.5}\n')
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        with suppress(UserError):
            write_report(run)
        config = validate(
            {"model": {"path": "m"}, "run": {"dir": str(tmp_path), "name": run.name}}, origin="x"
        )
        with suppress(UserError):
            take_run_directory(config, resume="auto", numbered=False)[1].close()
            changes(run, config)
            open_log(run, resume_step=0).__exit__()
