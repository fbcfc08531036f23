"""`paw view`: the page of runs that go on, served to this machine."""

import json

import pytest
from viewing import serving

from paw import cli
from paw.errors import UserError
from paw.tools import view
from paw.tools.view import is_this_machine, make_server, whole_number


def episode(step, task="t0", *, won=True):
    turn = {
        "action": "go east",
        "valid": True,
        "tokens": ["go", " east"],
        "logp": [-0.5, 0.0],
        "entropy": [1.0, 0.0],
        "advantage": 0.5,
        "selected": True,
        "observation": "You see a mug",
        "observation_tokens": ["You", " see", " a", " mug"],
        "observation_logp": [0.0, -0.7, -0.7, -2.3],
    }
    group = {"size": 8, "won": 3, "return": 0.4}
    record = {"step": step, "task": task, "kind": "pick", "won": won, "return": 1.0}
    return json.dumps(record | {"group": group, "length": 1, "turns": [turn]}) + "\n"


def append(path, text):
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "runs" / "paw"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 0}\n')
    (directory / "secret.txt").write_text("a secret")
    return directory


def changes(get, generation=0, start=0):
    status, text = get(f"/run/paw/changes?generation={generation}&from={start}")
    assert status == 200
    return json.loads(text)


def test_only_what_was_written_since_is_sent_even_after_a_resume(run):
    with serving(run) as get:
        assert changes(get)["rows"] == [], "the file is not there yet"
        append(run / "episodes.jsonl", episode(1) + episode(2) + '{"step": 3, "tu')
        first = changes(get)
        assert [row["step"] for row in first["rows"]] == [1, 2]
        assert first["rows"][0]["group"] == "3 of 8"

        append(run / "episodes.jsonl", 'rns": []}\nnot JSON\n' + episode(4))
        second = changes(get, start=2)
        assert [row["step"] for row in second["rows"]] == [3, 4]
        assert second["generation"] == first["generation"]
        assert second["version"] == first["version"]
        append(run / "metrics.jsonl", '{"step": 1}\n')
        assert changes(get, start=4)["version"] != first["version"]

        # A resume cuts the file back, and other episodes follow.
        (run / "episodes.jsonl").write_text(episode(1) + episode(2, "other") + episode(3) * 9)
        third = changes(get, generation=second["generation"], start=4)
        assert third["generation"] != second["generation"]
        assert [row["task"] for row in third["rows"][:3]] == ["t0", "other", "t0"]
        (run / "episodes.jsonl").unlink()
        assert changes(get, generation=third["generation"], start=11)["rows"] == []


def test_an_episode_is_read_when_it_is_opened(run):
    append(run / "samples.jsonl", json.dumps({"step": 0, "task": "t", "turns": [{}, 3]}) + "\n")
    append(run / "episodes.jsonl", episode(1) + episode(2, won=False))
    with serving(run) as get:
        rows = changes(get)["rows"]
        assert [row["id"].partition("-")[0] for row in rows] == [
            "evaluation",
            "training",
            "training",
        ]
        status, text = get(f"/run/paw/episode?id={rows[2]['id']}")
        assert status == 200
        (turn,) = json.loads(text)["turns"]
        assert turn["p"] == [0.6065, 1.0]
        assert turn["observation"][1] == [" see", 0.4966]
        assert turn["advantage"] == 0.5
        assert get(f"/run/paw/episode?id={rows[0]['id']}")[0] == 200
        for row_id in ("training-1", "../secret.txt", "", "training-0%00"):
            assert get(f"/run/paw/episode?id={row_id}")[0] == 404


def test_nothing_but_runs_is_served_and_only_to_this_machine(run):
    (run.parent / "notes").mkdir()
    (run.parent / "notes" / "metrics.txt").write_text("no run")
    (run.parent / "<b>'é").mkdir()
    (run.parent / "<b>'é" / "run.json").write_text("{}")
    with serving(run.parent) as get:
        status, text = get("/")
        assert status == 200
        assert 'href="/run/paw/"' in text
        assert 'href="/run/%3Cb%3E%27%C3%A9/"' in text
        assert "<b>" not in text
        assert "notes" not in text
        for path in (
            "/secret.txt", "/run/paw/secret.txt", "/run/paw/../../secret.txt", "/run/notes/", "/run/../",
            "/run/%2e%2e/", "/run/paw", "/run/paw/metrics.jsonl", "/run//", "/compare", "/compare?run=x",
        ):  # fmt: skip
            status, text = get(path)
            assert status == 404, path
            assert "secret" not in text
        assert get("/", Host="evil.example:80")[0] == 403
        assert get("/", Host="127.0.0.1.evil.example")[0] == 403
        assert get("/", Host="localhost:1")[0] == 200


@pytest.mark.slow
def test_a_page_without_an_update_yet_fills_up(run):
    with serving(run) as get:
        status, page = get("/")
        assert status == 200
        assert "No update has been logged yet" in page
        assert "connect-src 'self'" in page
        data = page.partition('id="episode-data">')[2].partition("</script>")[0]
        assert json.loads(data)["runs"][0]["url"] == "/run/paw/"
        append(run / "metrics.jsonl", '{"step": 1, "eval/success": 0.5, "reward/mean": 1.0}\n')
        page = get("/run/paw/")[1]
        assert "No update has been logged yet" not in page
        assert "50.0%" in page
        assert get("/run/paw/")[1] == page


def test_hosts_and_numbers():
    mine = ("localhost", "localhost:80", "127.0.0.1:5", "127.9.9.9", "[::1]:80", "a.localhost")
    assert all(map(is_this_machine, mine))
    others = (
        "",
        "example.com",
        "10.0.0.1:80",
        "localhost.example.com",
        "[::2]",
        "\x00",
        "0.0.0.0",
        "[",
    )
    assert not any(map(is_this_machine, others))
    assert list(map(whole_number, ("12", "", "-1", "x", "9" * 99, "²"))) == [12, 0, 0, 0, 0, 0]


def test_what_cannot_be_served_is_one_line(tmp_path, capsys):
    for words, message in (
        ([tmp_path / "gone"], "no such folder"),
        ([tmp_path], "no run in it"),
    ):
        assert cli.main(["view", *map(str, words)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    (tmp_path / "run.json").write_text("{}")
    for address in ({"port": 99_999}, {"host": "no such host"}):
        with pytest.raises(UserError, match="--port"):
            make_server(tmp_path, **address)
    assert cli.main(["view", str(tmp_path), "--optim.lr", "1"]) == 2
    assert view.make_server(tmp_path).RequestHandlerClass.any_host is False
