"""The report page, made from run directories as training leaves them: whole, damaged, hostile."""

import argparse
import json
import math
import random
import re
from pathlib import Path

import pytest

from paw.errors import UserError
from paw.rollout.success import wilson
from paw.tools import report
from paw.tools.report import SECTIONS, write_report

KINDS = ["pick", "look", "clean", "heat", "cool"]
CONFIG = """\
[run]
name = "{name}"
updates = {updates}
[model]
path = "quickstart"
[env]
name = "alfworld"
difficulty = "tiny"
[advantage]
estimator = "grpo"
[wm]
enabled = {world}
rho = 0.2
[eval]
temperature = 0.4
"""
OBSERVATION = "You arrive at shelf 2. On the shelf 2, you see a mug 1, a saltshaker 2, and a vase 1."


def evaluation(rng: random.Random, success: float) -> dict:
    low, high = wilson(round(256 * success), 256)
    kinds = {f"eval/success_{k}": min(1.0, max(0.0, success + rng.gauss(-0.05 * i, 0.04))) for i, k in enumerate(KINDS)}
    return {"eval/success": success, **kinds, "eval/games": 256, "eval/ci_low": low, "eval/ci_high": high}


def turn(index: int, rng: random.Random) -> dict:
    tokens = re.findall(r"mug 1|shelf 2|[\w']+|[.,]", OBSERVATION)
    return {
        "prompt": f"Your task is to: put a mug in shelf.\nStep {index}\n{OBSERVATION}\nActions: go to shelf 2, look",
        "response": "<think>The mug may be on the shelf.</think><action>go to shelf 2</action>",
        "action": "go to shelf 2",
        "valid": index != 2,
        "observation": OBSERVATION,
        "predicted": OBSERVATION if index % 2 else OBSERVATION.replace("mug 1", "plate 3"),
        "entropy": rng.uniform(0.1, 1.5),
        "selected": index % 4 != 3,
        "observation_token_p": [rng.choice([0.99, 0.97, 0.6, 0.15, 0.02]) for _ in tokens],
        "observation_tokens": tokens,
    }


def make_run(folder: Path, *, updates: int = 30, seed: int = 0, world: bool = True, end: float = 0.77, few=False):
    """A plausible run directory: a learning curve, every metric or `few`, episodes of the first and the last update."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(name=folder.name, updates=updates, world=str(world).lower()))
    info = {"paw": "0.1.0", "torch": "2.13.0", "device": "CPU, 2 threads", "engine": "transformers", "backend": "torch"}
    info |= {"model": "quickstart", "parameters": 162_304, "vocabulary": 320, "started": "2026-01-05T10:00:00Z"}
    (folder / "run.json").write_text(json.dumps(info | {"wall_s": 312.4, "warmup_s": 48.1, "games": "sha256 3f9a11"}))
    lines = [{"step": 0, **evaluation(rng, 0.398)}]
    for step in range(1, updates + 1):
        done = 1 - math.exp(-2.2 * step / updates)
        success = 0.32 + (end - 0.39) * done + rng.gauss(0, 0.04)
        line = {metric.key: rng.uniform(0.2, 0.9) for metrics in SECTIONS.values() for metric in metrics}
        line = {key: value for key, value in line.items() if not few and (world or not key.startswith("wm/"))}
        line |= {"step": step, "reward/mean": success, "success/all": success, "policy/kl": 0.004 * step}
        line |= {f"success/{kind}": min(1.0, max(0.0, success + rng.gauss(0, 0.1))) for kind in KINDS}
        line |= {"optim/lr": 5e-4, "perf/tokens_per_s": 30_000.0, "optim/skipped": 0, "health/sampler_mismatch": None}
        if step % max(updates // 6, 1) == 0:
            line |= evaluation(rng, 0.398 + (end - 0.398) * done)
        lines.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [
        {"step": step, "task": f"valid_unseen/{i}", "kind": KINDS[i], "won": step > 1, "return": float(step > 1),
         "turns": [turn(t, rng) for t in range(4 + i)]}
        for step in (1, updates // 2, updates) for i in range(3)
    ]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def self_contained(page: str) -> bool:
    """No script, nothing fetched: the only references are to ids of the page itself."""
    references = re.findall(r"""(?:src|href|action|data|poster)\s*=\s*["']?([^"'>\s]*)|url\(([^)]*)\)|@import""", page)
    return "<script" not in page.lower() and "http" not in page.replace("http-equiv", "") and all(
        (a or b).startswith("#") for a, b in references
    )  # fmt: skip


@pytest.mark.slow
def test_report_of_a_whole_run(tmp_path):
    page_path = write_report(make_run(tmp_path / "tiny"))
    page = page_path.read_text()
    assert page_path == tmp_path / "tiny" / "report.html"
    assert self_contained(page) and page_path.stat().st_size < 3_000_000
    assert "39.8%" in page and "[34.0, 45.9]" in page, "start of the headline, with its Wilson interval"
    assert "256 unseen games at temperature 0.4" in page
    assert "5 min 12 s" in page and "162k parameters" in page
    assert page.count("<svg") == len(list((tmp_path / "tiny" / "plots").glob("*.png"))) >= 15
    assert (tmp_path / "tiny" / "plots" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(set(re.findall(r'\sid="([^"]*)"', page))) == len(re.findall(r'\sid="[^"]*"', page)), "ids are unique"
    assert page.count('<details class="episode"') == 6
    assert re.search(r'<i class="kept" style="--q:0.98" title="p = 0.020">', page), "a token under the mask is marked"
    assert "<mark>plate" in page and ">exact<" in page and ">selected<" in page and ">invalid<" in page
    assert not re.search(r"\b(nan|None)\b", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))


@pytest.mark.slow
def test_hostile_text_stays_text(tmp_path):
    run = make_run(tmp_path / "run", few=True)
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>$\\frac{$ \ud800 \x00 &amp;'
    kind = "<script>$x_"
    hostile = turn(0, random.Random(0)) | {
        key: evil for key in ("prompt", "response", "action", "observation", "predicted")
    }
    hostile |= {"observation_tokens": [evil, 3, None], "observation_token_p": [0.1, "x", math.nan]}
    sample = {"step": 99, "task": evil, "kind": evil, "won": True, "return": evil, "length": evil, "turns": [hostile]}
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, f"eval/success_{kind}": 0.5, f"success/{kind}": 0.5}) + "\n")
    with (run / "config.toml").open("a") as file:
        file.write("# </pre><script>alert(3)</script>\n")
    (run / "run.json").write_text(json.dumps({"device": evil, "model": evil, "parameters": "many", "paw": evil}))
    page = write_report(run).read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page and "<img" not in page and "</pre><script" not in page


def test_truncated_log_still_gives_a_report(tmp_path):
    run = make_run(tmp_path / "run", few=True)
    for name in ("metrics.jsonl", "samples.jsonl", "run.json", "config.toml"):
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: len(data) * 2 // 3] + b"\xff")
    page = write_report(run).read_text()
    assert "2 unreadable lines left out" in page
    assert "39.8%" in page


@pytest.mark.slow
def test_two_runs_are_compared(tmp_path, capsys):
    runs = [make_run(tmp_path / "grpo", world=False, end=0.6), make_run(tmp_path / "paw", seed=1)]
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert report.run(parser.parse_args([str(path) for path in runs])) == 0
    page_path = tmp_path / "comparison" / "report.html"
    assert capsys.readouterr().out.strip() == str(page_path)
    page = page_path.read_text()
    assert self_contained(page)
    assert "2 runs compared" in page and "<code>wm.enabled</code></td><td>False</td><td>True</td>" in page
    assert "run.updates</code>" not in page, "only the keys that differ are listed"
    assert not (tmp_path / "grpo" / "report.html").exists()


@pytest.mark.slow
def test_long_runs_stay_small(tmp_path):
    run = make_run(tmp_path / "run", updates=12, few=True)
    long_turn = turn(0, random.Random(0))
    long_turn |= {
        "observation": "word " * 9000,
        "observation_tokens": ["word "] * 9000,
        "observation_token_p": [0.5] * 9000,
    }
    sample = {"step": 12, "task": "t", "kind": "pick", "won": False, "return": 0, "turns": [long_turn] * 50}
    (run / "samples.jsonl").write_text((json.dumps(sample) + "\n") * 4)
    page_path = write_report(run)
    assert page_path.stat().st_size < 3_000_000
    assert re.search(r"The first \d+ of 50 turns", page_path.read_text())


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such run directory"), ({}, "no metrics.jsonl"), ({"metrics.jsonl": '{"ste'}, "no metrics;")],
)
def test_nothing_to_report_is_one_line(tmp_path, content, message):
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(UserError, match="run") as caught:
        write_report(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)
