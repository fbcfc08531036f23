"""Passwords in URLs are used, but no file and no printed line contains them."""

import json
import shutil
import tomllib
from types import SimpleNamespace

import pytest
import torch
from command_line import as_words
from test_openenv import Scripted, seen
from test_servers import Peer, ask
from torch import nn
from websockets.sync.server import basic_auth

from paw import cli
from paw.config.keys import LISTS, built_in, fields, own_fields
from paw.config.recipe import as_tree, check_passwords, dump, load
from paw.config.sections import Config
from paw.distributed.ranks import Ranks
from paw.envs import make_factory
from paw.errors import UserError, clean, masked, short_repr
from paw.rollouts.engines.pool import SendingPool
from paw.rollouts.engines.server import ServerEngine
from paw.rollouts.engines.transfer import FileTransfer
from paw.rollouts.sync import push_weights
from paw.rundir.resume import changes
from paw.tools.evaluate.evaluate import _deciding_keys
from paw.tools.reference import explain
from paw.tools.train.trackers import Tracker

SECRET = "s3cr%2Ft"
BESIDE = {
    "engine.urls": {"engine.type": "server"},
    "engine.router": {"engine.type": "server", "engine.urls": "http://host"},
    "endpoint.url": {},
    "env.url": {"env.name": "openenv"},
    "env.retriever": {"env.name": "search"},
    "env.simulator.url": {"env.name": "search"},
    "reward.url": {
        "reward.type": "judge",
        "reward.model": "judge",
        "reward.rubric": "Is it right?",
    },
}
"""Keys that take a URL, with the settings that they need."""


def with_password(url):
    return url.replace("://", f"://me:{SECRET}@")


def takes_url(field):
    schema = f"{field.annotation} {field.metadata}"
    return "https?" in schema


def files_of(folder):
    """{path: content} for each file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_these_are_the_keys_that_take_a_url():
    keys = set()
    for section, field in Config.model_fields.items():
        if section in LISTS:  # their entries have the keys of other sections
            continue
        rows = list(fields(section, field.annotation))
        for name in built_in(field.annotation):
            rows += own_fields(section, field.annotation, name)
        keys |= {key for key, key_field, _ in rows if takes_url(key_field)}
    assert keys == set(BESIDE)


class RememberingTracker:
    """A tracker without a package. It keeps the configurations that it receives."""

    package = "x"

    def __init__(self, configurations):
        self.configurations = configurations

    def open(self, run, config, known):
        self.configurations.append(config)
        return "", None, None

    def _remember(self):
        pass


@pytest.mark.parametrize("key", BESIDE)
def test_no_key_of_a_configuration_shows_a_password(key, tmp_path, capsys):
    url = with_password("https://host:8000/v1")
    hidden = "https://me:***@host:8000/v1"
    settings = BESIDE[key] | {key: url}
    config = load("quickstart", settings)
    for text in (dump(config), explain(config)):
        assert SECRET not in text
        assert hidden in text
    assert SECRET not in json.dumps(as_tree(config))
    assert SECRET not in json.dumps(masked(_deciding_keys(config)))

    tracked = []
    tracker = RememberingTracker(tracked)
    Tracker.on_start(tracker, SimpleNamespace(ranks=Ranks(), directory=tmp_path, config=config))
    assert SECRET not in json.dumps(tracked)
    assert hidden in json.dumps(tracked)

    assert cli.main(["train", "quickstart", *as_words(settings), "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert hidden in printed.out

    path = tmp_path / "config.toml"  # a run's configuration, which lacks the password
    path.write_text(dump(config))
    assert changes(tmp_path, config) == []
    with pytest.raises(
        UserError,
        match=rf"^{key} = .*me:\*\*\*@host.*: files of a run do not keep passwords; .*--{key}",
    ):
        check_passwords(load(path))
    check_passwords(load(path, {key: url}))
    with pytest.raises(UserError, match="files of a run do not keep passwords"):
        make_factory(load(path))
    path.write_text(f'[model]\npath = "m"\n[{key.rpartition(".")[0]}]\n')  # a value that is refused
    with pytest.raises(UserError) as error:
        load(path, {"optim.lr": with_password("http://host")})
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:a@b:c@host/v1", "http://me:***@host/v1"),
        ("wss://:token@host", "wss://:***@host"),
        (
            "no 'HTTPS://Me:pass word@h', http://u:p@h?x=1",
            "no 'HTTPS://Me:pass word@h', http://u:***@h?x=1",
        ),
        ("['http://u:p@h1', 'http://u:q@h2']", "['http://u:***@h1', 'http://u:***@h2']"),
        (
            "http://host:8000/v1 mail@host http://host/@v1",
            "http://host:8000/v1 mail@host http://host/@v1",
        ),
        (
            "git@github.com:a/b me:pw@host http://me@host",
            "git@github.com:a/b me:pw@host http://me@host",
        ),
    ],
)
def test_what_counts_as_a_password(text, expected):
    assert masked(text) == clean(text) == expected
    assert masked([{"a": (text, 3, None)}]) == [{"a": [expected, 3, None]}]


def test_a_long_value_is_not_cut_within_a_password():
    url = f"http://me:{'p' * 300}@host"
    assert short_repr([url]) == "['http://me:***@host']"
    assert "p" * 4 not in short_repr({"a": url})
    assert "p" * 4 not in short_repr(url)


def test_lines_about_servers_of_the_engine_show_no_password(capsys):
    failing_peer = Peer("fails")
    working_peer = Peer()
    urls = [with_password(peer.url) for peer in (failing_peer, working_peer)]
    transfer = FileTransfer(torch.float32, 5)
    server_pool = SendingPool(
        urls, transfer, end_ids={3}, vocabulary=50, timeout_s=5, ranks=Ranks()
    )
    engine = ServerEngine(server_pool, 64)
    try:
        push_weights(nn.Linear(2, 3), engine, version=1)
        completions = ask(engine)
        hidden = working_peer.url.replace("://", "://me:***@")
        assert {completion.server for completion in completions} == {hidden}
        errors = capsys.readouterr().err
        assert "://me:***@127.0.0.1" in errors
        assert "gets no requests until next weights" in errors
        assert SECRET not in errors
        assert engine.exclude([hidden])
        assert [server.url for server in server_pool.servers] == urls[:1]
    finally:
        engine.close()


class Guarded(Scripted):
    """An OpenEnv server that asks for the password."""

    def http(self, connection, request):
        refusal = basic_auth(credentials=("me", "s3cr/t"))(connection, request)
        return refusal or super().http(connection, request)


def test_a_run_uses_the_password_and_writes_it_nowhere(paw_here, tiny_llm, tmp_path):
    server = Guarded()
    server.scripts = [[seen("begin"), seen("the end", 1.0, True)]]
    url = with_password(server.url)
    hidden = server.url.replace("://", "://me:***@")
    run = tmp_path / "run"
    recipe = tmp_path / "small.toml"
    recipe.write_text('[model]\npath = "-"\n')
    settings = {
        "model.path": tiny_llm(tmp_path / "model"), "run.dir": tmp_path, "run.name": "run", "run.updates": 1,
        "run.threads": 1, "rollout.tasks": 2, "rollout.group_size": 2, "eval.games": 2, "policy.kl_coef": 0,
        "engine.type": "transformers", "rollout.max_response_tokens": 4, "env.name": "openenv", "env.max_turns": 2,
    }  # fmt: skip
    try:
        trained = paw_here("train", recipe, settings, {"env.url": url})
        assert SECRET not in trained.stdout + trained.stderr
        paw_here("report", run)
        files = files_of(run)
        names = {path.name for path in files}
        assert names >= {"config.toml", "run.json", "metrics.jsonl", "samples.jsonl"}
        assert names >= {"report.html", "paw.toml"}
        assert not [path for path, content in files.items() if SECRET.encode() in content]
        assert tomllib.loads((run / "config.toml").read_text())["env"]["url"] == [hidden]

        for command in (("train", run / "config.toml"), ("eval", run)):
            assert paw_here(*command, code=2).stderr == (
                f"paw: env.url = ['{hidden}']: files of a run do not keep passwords; give the whole value again, in a "
                "recipe or with --env.url VALUE\n"
            ), command
        further = {"run.updates": 2, "env.url": url}
        resumed = paw_here("train", recipe, settings, further, "--resume", "auto").stdout
        assert "resumed from" in resumed
        assert "env.url" not in resumed

        wrong_url = url.replace(SECRET, "wrong")
        other_run = {"run.name": "other", "env.url": wrong_url}
        errors = paw_here("train", recipe, settings, other_run, code=2).stderr
        assert "wrong" not in errors
        assert "://me:***@127.0.0.1" in errors
        assert errors.count("\n") == 1
    finally:
        server.server.shutdown()


def test_reports_of_older_runs_show_no_password(quick_run, paw_here, tmp_path):
    """Older runs have the password in config.toml and run.json."""
    url = with_password("http://host")
    run = shutil.copytree(quick_run, tmp_path / "run")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('name = "alfworld"', f'name = "{url}"'))
    info = json.loads((run / "run.json").read_text())
    ending = {"how": "failed", "why": f"{url}: status 500", "at": info["started"]}
    (run / "run.json").write_text(json.dumps(info | {"ended": ending}))
    paw_here("report", run)
    report = (run / "report.html").read_text()
    assert SECRET not in report
    assert "failed: http://me:***@host: status 500" in report


def test_an_evaluation_writes_the_password_nowhere(server, tmp_path, capfd):
    pytest.importorskip("openai")
    settings = {
        "env": "alfworld", "env.data": "none", "env.difficulty": "tiny", "env.max_turns": 2, "eval.games": 2,
        "endpoint": with_password(server.url), "model": "m", "endpoint.retries": 0, "out": tmp_path / "out",
    }  # fmt: skip
    server.script = [(500, {"error": {"message": "no"}}, {})]
    assert cli.main(["eval", *as_words(settings)]) == 1
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err
    files = files_of(tmp_path / "out")
    assert {path.name for path in files} >= {"settings.json", "episodes.jsonl", "results.json"}
    assert not [path for path, content in files.items() if SECRET.encode() in content]
    assert "://me:***@127.0.0.1" in (tmp_path / "out" / "episodes.jsonl").read_text()

    settings |= {"endpoint": with_password("http://127.0.0.1:9"), "out": tmp_path / "other"}
    assert cli.main(["eval", *as_words(settings)]) == 2
    assert "endpoint.url = 'http://me:***@127.0.0.1:9': no answer" in capfd.readouterr().err


def test_a_retriever_is_named_without_its_password(server):
    hits = [{"document": {"id": "1", "contents": '"Town"\nA town.'}, "score": 1.0}]

    def answer(handler):
        handler.answer(200, {"result": [hits] * len(server.requests[-1]["queries"])}, {})

    server.default = answer
    settings = {"env.name": "search", "env.entities": 20, "env.eval_split": "test"}
    factory = make_factory(
        load("quickstart", settings | {"env.retriever": with_password(server.url)})
    )
    assert SECRET not in factory.fingerprint()
    assert "http://me:***@127.0.0.1" in factory.fingerprint()
    with pytest.raises(UserError) as error:
        make_factory(
            load("quickstart", settings | {"env.retriever": with_password("http://127.0.0.1:9")})
        )
    assert SECRET not in str(error.value)
    assert "me:***@127.0.0.1:9" in str(error.value)


def test_an_entry_of_a_list_shows_no_password(tmp_path):
    entry = f'type = "judge"\nmodel = "judge"\nrubric = "Is it right?"\nurl = "{with_password("https://host")}"\n'
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'base = "quickstart"\n[[rewards]]\nlabel = "fair"\n{entry}')
    config = load(recipe)
    check_passwords(config)
    for text in (dump(config), explain(config)):
        assert SECRET not in text
        assert "https://me:***@host" in text
    recipe.write_text(dump(config))
    with pytest.raises(UserError, match=r"^rewards\.fair\.url = .*do not keep passwords"):
        check_passwords(load(recipe))
