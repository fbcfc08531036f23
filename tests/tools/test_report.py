"""The report page, made from run directories as training leaves them: whole, damaged, hostile."""

import base64
import hashlib
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonl import write_jsonl

import paw
from paw import cli
from paw.errors import UserError
from paw.rollouts.success import wilson
from paw.tools.report.episodes import EpisodeIndex, embedded
from paw.tools.report.live_plot import LivePlot
from paw.tools.report.report import SECTIONS, write_report
from paw.tools.report.rundir import load_run

KINDS = ["pick", "look", "clean"]
CONFIG = """
run = {{ name = "{name}", updates = 30 }}
model.path = "quickstart"
env = {{ name = "alfworld", difficulty = "tiny" }}
advantage.type = "grpo"
wm = {{ enabled = {world}, rho = 0.2 }}
eval.temperature = 0.4
"""
OBSERVATION = (
    "You arrive at shelf 2. On the shelf 2, you see a mug 1, a saltshaker 2, and a vase 1."
)
TOKENS = re.findall(r"mug 1|shelf 2|[\w']+|[.,]", OBSERVATION)
TURN = {
    "prompt": f"Your task is to: put a mug in shelf.\n{OBSERVATION}\nActions: go to shelf 2, look",
    "response": "<think>The mug may be on the shelf.</think><action>go to shelf 2</action>",
    "action": "go to shelf 2", "valid": False, "observation": OBSERVATION, "predicted": OBSERVATION, "entropy": 0.5,
    "selected": True, "observation_token_p": [0.02, 0.99] * (len(TOKENS) // 2), "observation_tokens": TOKENS,
}  # fmt: skip


def evaluation(success: float) -> dict:
    low, high = wilson(round(256 * success), 256)
    kinds = {f"eval/success_{kind}": success for kind in KINDS}
    return {
        "eval/success": success,
        **kinds,
        "eval/games": 256,
        "eval/ci_low": low,
        "eval/ci_high": high,
    }


def make_run(folder: Path, *, world: bool = True, few_metrics: bool = False) -> Path:
    """A run directory with a curve, every metric or `few`, episodes of three updates: the first and
    last are shown."""
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(name=folder.name, world=str(world).lower()))
    info = {
        "paw": "0.1.0",
        "device": "CPU",
        "model": "quickstart",
        "parameters": 162_304,
        "wall_s": 312.4,
    }
    (folder / "run.json").write_text(json.dumps(info))
    keys = (
        [] if few_metrics else [metric.name for metrics in SECTIONS.values() for metric in metrics]
    )
    keys = [key for key in keys if world or not key.startswith("wm/")]
    lines = [{"step": 0, **evaluation(0.398)}]
    for step in range(1, 31):
        lines.append(dict.fromkeys(keys, 0.5) | {"step": step, "success/all": 0.3 + step / 100})
        lines[-1] |= {f"success/{kind}": 0.4 for kind in KINDS} | {"health/sampler_mismatch": None}
        lines[-1] |= evaluation(0.398 + step / 100) if step % 10 == 0 else {}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    turns = [TURN, TURN | {"predicted": OBSERVATION.replace("mug 1", "plate 3")}]
    samples = [{"step": step, "task": f"valid_unseen/{i}", "kind": kind, "won": step > 1, "return": 1.0, "turns": turns}
               for step in (1, 15, 30) for i, kind in enumerate(KINDS)]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)


def without_scripts(page: str) -> str:
    """The page without its data and its one script, which its policy allows by digest."""
    (kind, data), (no_attributes, script) = SCRIPT.findall(page)
    assert kind == ' type="application/json" id="episode-data"'
    assert no_attributes == ""
    assert "<" not in data
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in page
    return SCRIPT.sub("", page)


def episode_data(page: str) -> dict:
    return json.loads(SCRIPT.search(page)[2])


def self_contained(page: str) -> bool:
    """No foreign script, nothing fetched: the only references are to ids of the page itself."""
    page = without_scripts(page)
    references = re.findall(
        r"""(?:src|href|action|data|poster)\s*=\s*["']?([^"'>\s]*)|url\(([^)]*)\)|@import""", page
    )
    return "<script" not in page.lower() and "http" not in page.replace("http-equiv", "") and all(
        (reference or url).startswith("#") for reference, url in references
    )  # fmt: skip


@pytest.mark.slow
def test_report_of_a_whole_run(tmp_path):
    page_path = write_report(make_run(tmp_path / "tiny"))
    page = page_path.read_text()
    assert page_path == tmp_path / "tiny" / "report.html"
    assert self_contained(page)
    assert page_path.stat().st_size < 3_000_000
    assert "39.8%" in page, "start of the headline, with its Wilson interval"
    assert "[34.0, 45.9]" in page, "start of the headline, with its Wilson interval"
    assert "256 unseen games at temperature 0.4" in page
    assert "5 min 12 s" in page
    assert "162k parameters" in page
    assert page.count("<svg") == len(list((tmp_path / "tiny" / "plots").glob("*.png"))) >= 15
    assert (tmp_path / "tiny" / "plots" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    (run,) = episode_data(page)["runs"]
    page = without_scripts(page)
    assert len(set(re.findall(r'\sid="([^"]*)"', page))) == len(
        re.findall(r'\sid="[^"]*"', page)
    ), "ids are unique"
    assert [row["step"] for row in run["rows"]] == [1] * 3 + [15] * 3 + [30] * 3
    assert run["rho"] == 0.2
    assert run["left_out"] == 0
    exact, differing = run["details"][run["rows"][0]["id"]]["turns"]
    assert ["mug 1", 0.02] in [[text.strip(), p] for text, p in exact["observation"]]
    assert exact["exact"] is True
    assert exact["selected"] is True
    assert exact["valid"] is False
    assert [text for text, differs in differing["predicted"] if differs] == ["plate", "3,"]
    assert not re.search(
        r"\b(nan|None)\b", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    )


@pytest.mark.slow
def test_hostile_long_and_damaged_text_stays_text(tmp_path):
    run = make_run(tmp_path / "run", few_metrics=True)
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>$\\frac{$ \ud800 \x00 &amp;'
    hostile = TURN | dict.fromkeys(
        ("prompt", "response", "action", "observation", "predicted"), evil
    )
    hostile |= {"observation_tokens": [evil, 3, None], "observation_token_p": [0.1, "x", math.nan]}
    long_turn = TURN | {"observation": "word " * 9000, "observation_tokens": ["word "] * 9000}
    long_turn |= {"observation_token_p": [0.5] * 9000}
    sample = {
        "step": 99,
        "task": evil,
        "kind": evil,
        "won": True,
        "return": evil,
        "length": evil,
        "turns": [hostile],
    }
    for name, added in {
        "samples.jsonl": f"{json.dumps(sample)}\n"
        + f"{json.dumps(sample | {'turns': [long_turn] * 50})}\n" * 4
        + '{"step"',
        "metrics.jsonl": json.dumps(
            {"step": 31, "eval/success_<script>$x_": 0.5, "success/<script>$x_": 0.5}
        )
        + "\n{",
        "config.toml": "# </pre><script>alert(3)</script>\n",
    }.items():
        with (run / name).open("a") as file:
            file.write(added)
    (run / "run.json").write_text(
        json.dumps({"device": evil, "model": evil, "parameters": "many", "paw": evil})
    )
    page_path = write_report(run)
    page = page_path.read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "39.8%" in page
    assert "<script" not in without_scripts(page)
    assert "<img" not in without_scripts(page)
    (shown,) = episode_data(page)["runs"]
    assert [len(detail["turns"]) < detail["total"] == 50 for detail in shown["details"].values()][
        -4:
    ] == [True] * 4
    assert "\x00" not in json.dumps(shown["rows"], ensure_ascii=False)
    assert page_path.stat().st_size < 3_000_000
    assert "2 unreadable lines left out" in page
    for name in ("metrics.jsonl", "samples.jsonl", "run.json", "config.toml"):
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: len(data) // 4] + b"\xff")
    page = write_report(run).read_text()
    assert "39.8%" in page
    assert "2 unreadable lines left out" in page


@pytest.mark.slow
def test_two_runs_are_compared(tmp_path, capsys):
    runs = [make_run(tmp_path / "grpo", world=False), make_run(tmp_path / "paw")]
    assert cli.main(["report", *map(str, runs)]) == 0
    page_path = tmp_path / "comparison" / "report.html"
    assert capsys.readouterr().out.strip() == str(page_path)
    page = page_path.read_text()
    assert self_contained(page)
    assert not (tmp_path / "grpo" / "report.html").exists()
    assert "2 runs compared" in page
    shown = episode_data(page)["runs"]
    assert [(run["name"], run["rho"], len(run["rows"])) for run in shown] == [
        ("grpo", None, 9),
        ("paw", 0.2, 9),
    ]
    assert "<code>wm.enabled</code></td><td>False</td><td>True</td>" in page
    assert "run.updates</code>" not in page, "only the keys that differ are listed"


def test_nothing_to_report_is_one_line(tmp_path):
    folder = tmp_path / "run"
    for make, message in (
        (lambda: None, "no such run directory"),
        (folder.mkdir, "no metrics.jsonl"),
        (lambda: (folder / "metrics.jsonl").write_text('{"ste'), "no metrics in it;"),
    ):
        make()
        with pytest.raises(UserError, match=f"run.*{message}") as caught:
            write_report(folder)
        assert "\n" not in str(caught.value)


def test_a_large_run_keeps_episodes_of_all_its_parts(tmp_path):
    lines = []
    for step in range(1, 301):
        record = {"step": step, "task": f"t{step}", "won": False, "length": 1, "turns": [TURN]}
        lines.append(json.dumps(record) + "\n")
    (tmp_path / "episodes.jsonl").write_text("".join(lines))
    index = EpisodeIndex(tmp_path)
    index.update()
    assert len(index.rows) == 300
    rows, details = embedded(index, limit=len("".join(lines)) // 10)
    steps = [row["step"] for row in rows]
    assert 28 <= len(steps) <= 30
    assert details.keys() == {row["id"] for row in rows}
    assert (steps[0], steps[-1]) == (1, 300)
    assert max(later - step for step, later in itertools.pairwise(steps)) <= 11


def test_each_of_several_environments_has_its_pass_at_k(tmp_path):
    metrics = {"eval/pass_at_2": 0.5, "eval/pass_at_2_a": 0.25}
    interval = {"eval/pass_at_2_low_a": 0.1, "eval/pass_at_2_high_a": 0.4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, **metrics, **interval}) + "\n")
    (tmp_path / "config.toml").write_text('[[envs]]\nname = "x"\nlabel = "a"\n')
    run = load_run(tmp_path)
    assert run.labels == ["a"]
    assert run.attempts_at(0) == {2: (0.5, (0.5, 0.5))}
    assert run.attempts_at(0, "a") == {2: (0.25, (0.1, 0.4))}
    assert "a: pass@k" in write_report(tmp_path).read_text()


def test_a_plot_of_runs_is_drawn_as_they_go_on(tmp_path, monkeypatch):
    """Outside of a notebook it is drawn when it is saved."""
    with pytest.raises(UserError, match="draws nothing; name metrics"):
        LivePlot()
    with pytest.raises(UserError, match=r"LivePlot: \['wm/loss'\] is not the name of a metric"):
        LivePlot(["wm/loss"])
    said = []
    plot = LivePlot("eval/success", "wm/loss")
    for name in ("first", "second"):
        first = SimpleNamespace(first=True)
        run = SimpleNamespace(
            directory=tmp_path / name, ranks=first, failed=name == "first", say=said.append
        )
        plot.on_start(run)
        empty = plot.png()
        run.directory.mkdir()
        lines = [{"step": step, "eval/success": 0.1 * step} for step in range(3)]
        write_jsonl(run.directory / "metrics.jsonl", lines)
        plot.on_update(run, {})
        plot.on_end(run)
        assert plot.png() != empty
    (line,) = said
    assert line.startswith("paw.LivePlot: this run has no metric 'wm/loss'; ")
    assert plot.save(tmp_path / "plot.png").read_bytes() == plot.png()
    with pytest.raises(UserError, match=r"cannot write .*nowhere"):
        plot.save(tmp_path / "nowhere" / "plot.png")


def test_a_metric_is_its_values_by_update(tmp_path):
    lines = [{"step": 0, "eval/success": 0.25}, {"step": 1}, {"step": 2, "eval/success": 0.5}]
    lines[1]["eval/success"] = -1.7e308  # no plot has room for it
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    assert paw.metric(tmp_path, "eval/success") == {0: 0.25, 2: 0.5}
    with pytest.raises(UserError, match="no metric 'eval/succes'; did you mean 'eval/success'"):
        paw.metric(tmp_path, "eval/succes")
