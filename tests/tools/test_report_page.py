"""The page of `paw report` and `paw view` in a real browser: the table of episodes, the colours of
tokens, and two episodes side by side show the numbers of episodes.jsonl."""

import json
import math
import shutil

import browser
import pytest
from viewing import serving

from paw.tools.report.report import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.PROGRAM is None, reason="there is no Chromium here"),
]
HOSTILE = "</script><img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
LONG = "x" * 3000
TOKENS = """[...document.querySelectorAll('.reader article')].map((article) =>
  [...article.querySelectorAll('.turn')].map((turn) => [...turn.querySelectorAll('pre i')].map((token) =>
    [token.textContent, token.className, Number(token.style.getPropertyValue('--q')), token.title])))"""
ROWS = "[...document.querySelectorAll('.episodes tbody tr')].map((row) => row.textContent)"


def episode(step, task, *, won, action="go east"):
    """An episode of two turns, whose numbers all depend on its update."""
    turns = []
    for number in range(2):
        turns.append(
            {
                "action": action,
                "valid": True,
                "tokens": ["go", " east", LONG if step == 1 else "."],
                "logp": [-0.1 * step, -0.5, 0.0],
                "entropy": [0.2 * step, 3.0, 0.0],
                "advantage": 1.5 if won else -0.5,
                "selected": number == 0,
                "observation": f"You see {HOSTILE}",
                "observation_tokens": ["You", " see"],
                "observation_logp": [-0.05 * step, -3.0],
            }
        )
    record = {"step": step, "task": task, "kind": "pick", "won": won, "return": float(won)}
    return record | {"group": {"size": 8, "won": 3}, "length": 2, "turns": turns}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that have played the same tasks, one of them with other actions in task t2."""
    folder = tmp_path_factory.mktemp("runs")
    episodes = {}
    for name in ("paw", "grpo"):
        directory = folder / name
        directory.mkdir()
        (directory / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
        (directory / "config.toml").write_text("[wm]\nrho = 0.9\n")
        episodes[name] = []
        for step in range(1, 10):
            is_other = name == "grpo" and step == 2
            action = "go west" if is_other else "go east"
            task = f"t{step}" if step != 3 else HOSTILE
            won = step % 3 == 0
            episodes[name].append(episode(step, task, won=won, action=action))
        lines = [json.dumps(record) + "\n" for record in episodes[name]]
        (directory / "episodes.jsonl").write_text("".join(lines))
    return folder, episodes


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def choose(page, label, value):
    """Set a field of the filter, as a user would."""
    page.run(f"""(() => {{
      const labels = [...document.querySelectorAll('.filters label')];
      const field = labels.find((label) => label.textContent.startsWith({label!r})).lastChild;
      field.value = {value!r};
      field.dispatchEvent(new Event(field.tagName === 'SELECT' ? 'change' : 'input'));
    }})()""")


def open_episode(page, text):
    """Open the episode of the first row that has this text."""
    page.run(f"""(() => {{
      const rows = [...document.querySelectorAll('.episodes tbody tr')];
      rows.find((row) => row.textContent.includes({json.dumps(text)})).querySelector('button').click();
    }})()""")
    page.wait_for(f"document.querySelector('.reader h3')?.textContent.includes({json.dumps(text)})")


def tokens_by(page, mode):
    """Colour by `mode`. Returns (text, class, amount, title) of each token: [episode][turn]."""
    page.run(f"document.querySelector('.modes input[value={mode}]').click()")
    page.wait_for(f"document.querySelector('.modes input:checked').value === '{mode}'")
    return page.run(TOKENS)


def test_the_filter_leaves_what_the_file_says(page, runs):
    folder, episodes = runs
    page.open(write_report(folder / "paw", folder / "grpo").as_uri())
    every = [*episodes["paw"], *episodes["grpo"]]
    count = "document.querySelector('#browser > p').textContent"
    assert page.run(count) == f"{len(every)} of {len(every)} episodes"

    choose(page, "Success", "yes")
    won = [record for record in every if record["won"]]
    assert page.run(count) == f"{len(won)} of {len(every)} episodes"
    rows = page.run(ROWS)
    assert len(rows) == len(won)
    assert all("won" in row and "not won" not in row and "3 of 8" in row for row in rows)
    choose(page, "From update", "4")
    assert page.run(count).startswith(f"{sum(record['step'] >= 4 for record in won)} of")
    choose(page, "Task, kind or action", "t6 pick")
    assert page.run(count).startswith("2 of")
    choose(page, "Run", "1")
    assert page.run(count).startswith("1 of")
    choose(page, "Success", "no")
    assert page.run(ROWS) == ["No episode matches."]
    assert page.errors == []


def test_tokens_have_the_colours_of_their_numbers(page, runs):
    folder, episodes = runs
    page.open(write_report(folder / "paw").as_uri())
    open_episode(page, "t5")
    record = episodes["paw"][4]
    turn = record["turns"][0]
    p = [math.exp(logp) for logp in turn["logp"]]
    seen = [math.exp(logp) for logp in turn["observation_logp"]]

    ((first, _),) = tokens_by(page, "probability")
    assert [text for text, *_ in first] == ["go", " east", ".", "You", " see"]
    expected = [pytest.approx(1 - value, abs=6e-4) for value in (*p, *seen)]
    assert [amount for _, _, amount, _ in first] == expected
    assert first[0][3] == f"p = {p[0]:.3f}, entropy 1.00 nats, advantage -0.5"

    ((first, _),) = tokens_by(page, "entropy")
    assert [amount for _, _, amount, _ in first[:3]] == [0.5, 1.0, 0.0], "2 nats have it in full"
    ((first, _),) = tokens_by(page, "advantage")
    assert [token[1:3] for token in first[:3]] == [["heat", 0.25]] * 3
    ((first, second),) = tokens_by(page, "mask")
    assert [token[1] for token in first[3:]] == ["kept", "kept"]
    assert [token[1] for token in second[3:]] == ["", ""], "a turn that was not selected"
    assert seen[0] <= 0.9
    colour = "getComputedStyle(document.querySelector('.turn i.kept')).backgroundColor"
    assert page.run(colour) == "rgba(213, 94, 0, 0.35)"

    open_episode(page, "t1")
    ((first, _),) = tokens_by(page, "mask")
    assert [token[1] for token in first[3:]] == ["masked", "kept"], "p = 0.95 is above rho"


def test_two_episodes_of_a_task_are_compared_turn_by_turn(page, runs):
    folder, _ = runs
    page.open(write_report(folder / "paw", folder / "grpo").as_uri())
    differing = """[...document.querySelectorAll('.reader article')].map((article) =>
      [article.querySelector('b').textContent, [...article.querySelectorAll('.turn .badge')].filter(
        (badge) => badge.textContent === 'other action').length])"""
    open_episode(page, "t2")
    (one, differences), (other, other_differences) = page.run(differing)
    assert {one, other} == {"paw", "grpo"}
    assert (differences, other_differences) == (0, 2)
    assert [len(turns) for turns in tokens_by(page, "probability")] == [2, 2]
    open_episode(page, "t4")
    assert [count for _, count in page.run(differing)] == [0, 0]


def test_what_an_environment_writes_is_text_and_fits_a_narrow_screen(page, runs):
    folder, _ = runs
    page.open(write_report(folder / "paw", folder / "grpo").as_uri(), width=390)
    for text in (HOSTILE, "t1"):  # the second has a token of 3,000 characters
        open_episode(page, text)
        assert page.run("window.hacked === undefined && !document.querySelector('main img')")
        assert page.run("document.documentElement.scrollWidth") <= 390


def test_a_live_page_shows_what_is_written_and_stays_as_it_was_opened(page, runs, tmp_path):
    run = shutil.copytree(runs[0] / "paw", tmp_path / "paw")
    file = run / "episodes.jsonl"
    with serving(run) as get:
        page.open(get.url)
        page.wait_for("document.querySelectorAll('.episodes tbody button').length === 9")
        open_episode(page, "t5")
        assert len(tokens_by(page, "entropy")[0]) == 2
        with file.open("a") as lines:
            lines.write(json.dumps(episode(10, "t10", won=True)) + "\n")
        page.run("poll()")
        page.wait_for("document.querySelectorAll('.episodes tbody button').length === 10")
        assert "t10" in page.run(ROWS)[0]
        assert page.run("document.querySelector('.reader h3').textContent") == "t5"
    assert page.errors == []
