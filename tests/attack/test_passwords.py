"""Passwords in URLs: used, and in no file and no line that anything writes."""

import json
import shutil
import tomllib
from types import SimpleNamespace

import pytest
import torch
from test_openenv import Scripted, seen
from test_servers import Peer, ask, connected  # noqa: F401
from torch import nn
from websockets.sync.server import basic_auth

from paw import cli
from paw.config.keys import built_in, fields, own_fields
from paw.config.recipe import as_tree, check_passwords, dump, load
from paw.config.sections import Config
from paw.distributed.ranks import Ranks
from paw.envs import make_factory
from paw.errors import UserError, clean, masked, shown
from paw.rollouts.engines.server import SendingPool, ServerEngine
from paw.rollouts.engines.transfer import FileTransfer
from paw.rollouts.sync import push_weights
from paw.rundir.resume import changes
from paw.tools.evaluate.evaluate import _settings
from paw.tools.reference import explain
from paw.tools.train.trackers import Tracker

SECRET = "s3cr%2Ft"
BESIDE = {
    "engine.urls": {"engine.type": "server"},
    "endpoint.url": {},
    "env.url": {"env.name": "openenv"},
    "env.retriever": {"env.name": "search"},
    "env.simulator.url": {"env.name": "search"},
}
"""Keys that take a URL, and the choices that they need."""


def with_password(url):
    return url.replace("://", f"://me:{SECRET}@")


def takes_url(field):
    schema = f"{field.annotation} {field.metadata}"
    return "https?" in schema


def test_these_are_the_keys_that_take_a_url():
    found = set()
    for section, field in Config.model_fields.items():
        rows = list(fields(section, field.annotation))
        for name in built_in(field.annotation):
            rows += own_fields(section, field.annotation, name)
        found |= {dotted for dotted, field, _ in rows if takes_url(field)}
    assert found == set(BESIDE)


@pytest.mark.parametrize("key", BESIDE)
def test_no_key_of_a_configuration_shows_one(key, tmp_path, capsys):
    url = with_password("https://host:8000/v1")
    config = load("quickstart", BESIDE[key] | {key: url})
    hidden = "https://me:***@host:8000/v1"
    texts = [
        dump(config),
        explain(config),
        json.dumps(as_tree(config)),
        json.dumps(masked(_settings(config))),
    ]
    assert all(SECRET not in text for text in texts)
    assert hidden in dump(config)
    assert hidden in explain(config)
    seen = []
    stage = SimpleNamespace(ranks=Ranks(), directory=tmp_path, config=config)
    tracker = SimpleNamespace(
        package="x", open=lambda run, config, known: (seen.append(config), ("", None, None))[1]
    )
    tracker._remember = lambda: None
    Tracker.on_start(tracker, stage)
    assert SECRET not in json.dumps(seen)
    assert hidden in json.dumps(seen)

    words = [part for k, value in (BESIDE[key] | {key: url}).items() for part in (f"--{k}", value)]
    assert cli.main(["train", "quickstart", *words, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    assert hidden in said.out

    path = tmp_path / "config.toml"  # a run's, which lacks the password
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
    assert shown([url]) == "['http://me:***@host']"
    assert "p" * 4 not in shown({"a": url}) + shown(url)


def test_lines_about_servers_of_the_engine_show_none(connected, capsys):  # noqa: F811
    bad = Peer("fails")
    good = Peer()
    urls = [with_password(peer.url) for peer in (bad, good)]
    transfer = FileTransfer(torch.float32, 5)
    pool = SendingPool(urls, transfer, end_ids={3}, vocabulary=50, timeout_s=5, ranks=Ranks())
    engine = ServerEngine(pool, 64)
    try:
        push_weights(nn.Linear(2, 3), engine, version=1)
        done = ask(engine)
        assert {completion.server for completion in done} == {good.url.replace("://", "://me:***@")}
        said = capsys.readouterr().err
        assert "://me:***@127.0.0.1" in said
        assert "is left out until the next weights" in said
        assert SECRET not in said
        assert engine.leave_out([done[0].server])
        assert [server.url for server in pool.servers] == urls[:1]
    finally:
        engine.close()


class Guarded(Scripted):
    """A server of OpenEnv that asks for the password."""

    def http(self, connection, request):
        refusal = basic_auth(credentials=("me", "s3cr/t"))(connection, request)
        return refusal or super().http(connection, request)


def test_a_run_uses_it_and_writes_it_nowhere(paw_here, tiny_llm, tmp_path):
    server = Guarded()
    server.scripts = [[seen("begin"), seen("the end", 1.0, True)]]
    url, hidden = with_password(server.url), server.url.replace("://", "://me:***@")
    recipe = tmp_path / "small.toml"
    recipe.write_text('[model]\npath = "-"\n')
    keys = {
        "model.path": tiny_llm(tmp_path / "model"), "run.dir": tmp_path, "run.name": "run", "run.updates": 1,
        "run.threads": 1, "rollout.tasks": 2, "rollout.group_size": 2, "eval.games": 2, "policy.kl_coef": 0,
        "engine.type": "transformers", "rollout.max_response_tokens": 4, "env.name": "openenv", "env.max_turns": 2,
    }  # fmt: skip
    try:
        done = paw_here("train", recipe, keys, {"env.url": url})
        lines = done.stdout + done.stderr
        paw_here("report", tmp_path / "run")
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert {
            "config.toml",
            "run.json",
            "metrics.jsonl",
            "samples.jsonl",
            "report.html",
            "paw.toml",
        } <= {path.name for path in files}
        assert not [path for path in files if SECRET.encode() in path.read_bytes()]
        assert SECRET not in lines
        assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["env"]["url"] == [
            hidden
        ]

        for words in (("train", tmp_path / "run" / "config.toml"), ("eval", tmp_path / "run")):
            error = paw_here(*words, code=2).stderr
            assert error == (
                f"paw: env.url = ['{hidden}']: files of a run do not keep passwords; give the whole value again, in a "
                "recipe or with --env.url VALUE\n"
            ), words
        again = {"run.updates": 2, "env.url": url}
        said = paw_here("train", recipe, keys, again, "--resume", "auto").stdout
        assert "resumed from" in said
        assert "env.url" not in said
        other = with_password(server.url).replace(SECRET, "wrong")
        error = paw_here(
            "train", recipe, keys, {"run.name": "other", "env.url": other}, code=2
        ).stderr
        assert "wrong" not in error
        assert "://me:***@127.0.0.1" in error
        assert error.count("\n") == 1
    finally:
        server.server.shutdown()


def test_reports_of_older_runs_show_none(quick_run, paw_here, tmp_path):
    """Whose config.toml and run.json have it."""
    run = shutil.copytree(quick_run, tmp_path / "run")
    config = (
        (run / "config.toml")
        .read_text()
        .replace('name = "alfworld"', f'name = "{with_password("http://host")}"')
    )
    (run / "config.toml").write_text(config)
    info = json.loads((run / "run.json").read_text())
    ended = {
        "how": "failed",
        "why": f"{with_password('http://host')}: status 500",
        "at": info["started"],
    }
    (run / "run.json").write_text(json.dumps(info | {"ended": ended}))
    paw_here("report", run)
    page = (run / "report.html").read_text()
    assert SECRET not in page
    assert "failed: http://me:***@host: status 500" in page


def test_an_evaluation_writes_it_nowhere(server, tmp_path, capfd):
    pytest.importorskip("openai")
    keys = {
        "env": "alfworld", "env.data": "none", "env.difficulty": "tiny", "env.max_turns": 2, "eval.games": 2,
        "endpoint": with_password(server.url), "model": "m", "endpoint.retries": 0, "out": tmp_path / "out",
    }  # fmt: skip
    server.script = [(500, {"error": {"message": "no"}}, {})]
    words = [str(part) for key, value in keys.items() for part in (f"--{key}", value)]
    assert cli.main(["eval", *words]) == 1
    said = capfd.readouterr()
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"settings.json", "episodes.jsonl", "results.json"} <= {path.name for path in files}
    assert not [path for path in files if SECRET in path.read_text()]
    assert SECRET not in said.out + said.err
    assert "://me:***@127.0.0.1" in (tmp_path / "out" / "episodes.jsonl").read_text()
    keys |= {"endpoint": with_password("http://127.0.0.1:9"), "out": tmp_path / "other"}
    words = [str(part) for key, value in keys.items() for part in (f"--{key}", value)]
    assert cli.main(["eval", *words]) == 2
    assert "endpoint.url = 'http://me:***@127.0.0.1:9': no answer" in capfd.readouterr().err


def test_a_retriever_is_named_without_it(server):
    hits = [{"document": {"id": "1", "contents": '"Town"\nA town.'}, "score": 1.0}]

    def answer(handler):
        handler.answer(200, {"result": [hits] * len(server.requests[-1]["queries"])}, {})

    server.default = answer
    keys = {"env.name": "search", "env.entities": 20, "env.eval_split": "test"}
    factory = make_factory(load("quickstart", keys | {"env.retriever": with_password(server.url)}))
    assert SECRET not in factory.fingerprint()
    assert "http://me:***@127.0.0.1" in factory.fingerprint()
    with pytest.raises(UserError) as error:
        make_factory(
            load("quickstart", keys | {"env.retriever": with_password("http://127.0.0.1:9")})
        )
    assert SECRET not in str(error.value)
    assert "me:***@127.0.0.1:9" in str(error.value)
