"""`make gpu`: a part that fails costs its own rows, a row has a measured value or a reason, and the
page has the table of today."""

import csv
import importlib
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from forked import CONTEXT

from paw.cli import main
from paw.config.recipe import load

first_hour, parts_module = (
    importlib.import_module(f"bench.gpu.{name}") for name in ("first_hour", "parts")
)
Part, Reading = parts_module.Part, parts_module.Reading
FACTS = {"device": "a card", "gpus": "1", "commit": "abc"}


def read_number(path: Path, exit_code: int):
    """The whole file is one number."""
    if not path.exists():
        return Reading()
    return Reading({("case", "time"): float(path.read_text())})


def part(name, program, **options):
    settings = {
        "cases": {"case": {"time": "s"}},
        "read": read_number,
        "minutes": 1.0,
        "out": f"{name}.txt",
    }
    return Part(name=name, command=("-c", program, "{out}"), **settings | options)


WRITES = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('1.25')"


def table_of(path):
    with path.open(newline="") as file:
        return {row["part"]: (row["value"], row["reason"]) for row in csv.DictReader(file)}


def test_each_part_costs_its_own_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(first_hour, "TICK_S", 0.01)
    child = tmp_path / "child"
    hangs = (
        "import os, pathlib, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid)); print('compiling', flush=True); "
        "time.sleep(600)"
    )
    chosen = [
        part("good", WRITES),
        part("broken", "print('CUDA error: no kernel image'); raise SystemExit(3)"),
        part("killed", "import os; os.kill(os.getpid(), 9)"),
        part("absent", WRITES, needs={"no_such_module": "'paw-trainer[vllm]'"}),
        part("silent", ""),
        part("hangs", hangs, minutes=0.05),
        part("good too", WRITES),
    ]
    table = tmp_path / "table.csv"
    code = first_hour.measure([*chosen, part("left out", WRITES)], chosen, FACTS, table, tmp_path)
    assert code == 1
    assert table_of(table) == {
        "good": ("1.25", ""),
        "broken": ("", "exit code 3: CUDA error: no kernel image"),
        "killed": ("", "exit code -9: no output"),
        "absent": ("", "no_such_module is not installed: pip install 'paw-trainer[vllm]'"),
        "silent": ("", "not installed, or not for this GPU"),
        "hangs": ("", "stopped after 0.05 minutes: compiling"),
        "good too": ("1.25", ""),
        "left out": ("", "not measured"),
    }
    pid = int(child.read_text())
    assert not is_running(pid)  # what a part has started ends with it
    output = capsys.readouterr().out
    assert "[2/7] broken: case" in output
    assert "| good | case | 1.25 s |" in output
    assert "| left out | case | not measured (s) |" in output
    assert "device a card, gpus 1, commit abc" in output


def is_running(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_part_alone_keeps_the_rows_of_the_same_machine_and_commit(tmp_path):
    every = [part("one", WRITES), part("two", WRITES)]
    table = tmp_path / "table.csv"
    assert first_hour.measure(every, every[:1], FACTS, table, tmp_path) == 0
    assert first_hour.measure(every, every[1:], FACTS, table, tmp_path) == 0
    assert table_of(table) == {"one": ("1.25", ""), "two": ("1.25", "")}
    assert first_hour.measure(every, every[1:], FACTS | {"commit": "new"}, table, tmp_path) == 0
    assert table_of(table) == {"one": ("", "not measured"), "two": ("1.25", "")}


def test_ctrl_c_keeps_what_is_measured(tmp_path, monkeypatch):
    started = []

    def interrupted(command, log, *, minutes):
        started.append(command)
        if len(started) == 2:
            raise KeyboardInterrupt
        return run_process(command, log, minutes=minutes)

    run_process = first_hour.run_process
    monkeypatch.setattr(first_hour, "run_process", interrupted)
    chosen = [part(name, WRITES) for name in ("one", "two", "three")]
    table = tmp_path / "table.csv"
    assert first_hour.measure(chosen, chosen, FACTS, table, tmp_path) == 130
    assert table_of(table) == {
        "one": ("1.25", ""),
        "two": ("", "interrupted"),
        "three": ("", "not measured"),
    }


def test_the_files_of_the_parts_are_read_as_they_are_written(tmp_path):
    tests = tmp_path / "tests.xml"
    tests.write_text(
        '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10"/>'
        "</testsuites>"
    )
    read = parts_module.read_tests(tests, 1)
    case = "pytest -m gpu"
    assert read.values == {(case, "passed"): 4, (case, "failed"): 3, (case, "skipped"): 3}

    kernels = tmp_path / "kernels.csv"
    columns = "head,T,mode,live,dead,implementation,ms,peak_mib,passes,error"
    point = "Llama-3.1-8B,4096,forward + backward"
    kernels.write_text(
        f"{columns}\n{point},1.0,,paw[triton],17.5,60.0,yes,\n"
        f"{point},0.4,found,paw[triton],10.5,61.0,yes,\n"
        f"{point},0.4,known,paw[triton],7.0,61.0,yes,\n"
        f"{point},1.0,,quack,,,,OutOfMemoryError: no memory\n"
        f"{point},1.0,,liger_triton,9.0,9.0,no,\nQwen2.5-7B,32768,forward,1.0,,paw[cuda],1,1,yes,\n"
    )
    read = parts_module.read_kernels(kernels, 0)
    assert read.values == {
        ("paw[triton], f 1.0", "ms"): 17.5,
        ("paw[triton], f 1.0", "peak_mib"): 60.0,
        ("paw[triton], f 0.4", "ms"): 10.5,
        ("paw[triton], f 0.4", "peak_mib"): 61.0,
    }
    assert read.reasons == {
        "quack, f 1.0": "OutOfMemoryError: no memory",
        "liger_triton, f 1.0": "its gradients are inaccurate",
    }

    server = tmp_path / "server.json"
    seconds = {"update": 4.0, "rollout": 2.0, "score": 0.5, "sync": 0.5}
    server.write_text(json.dumps({"0": seconds}))  # the second run failed
    read = parts_module.read_server(server, 1)
    assert read.values == {("rollout.ahead 0", name): value for name, value in seconds.items()}
    for reader in (parts_module.read_tests, parts_module.read_kernels, parts_module.read_server):
        assert reader(tmp_path / "absent", 1) == Reading()


def test_a_machine_without_a_gpu_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(first_hour, "machine", lambda: {"gpus": "0", "torch": "2.13.0"})
    assert first_hour.main([]) == 2
    error = capsys.readouterr().err
    assert error == "make gpu: no GPU: torch 2.13.0 sees none (paw doctor says what is installed)\n"
    assert first_hour.main(["--only", "nothing"]) == 2
    assert "--only nothing: no part has that in its name: installation, " in capsys.readouterr().err


def test_the_page_has_the_table_of_today():
    page = first_hour.PAGE.read_text(encoding="utf-8")
    assert first_hour.with_table(page) == page
    assert "not measured (" in page


@pytest.mark.slow
def test_every_key_of_the_commands_is_one_of_today(tmp_path):
    for keys in parts_module.UPDATE_KEYS.values():
        load("alfworld-grpo-paw", parts_module.PLAIN | keys)
    server = importlib.import_module("bench.gpu.server")
    for gpus, small in ((0, True), (1, False), (2, False)):
        keys = server.settings("model", ["http://127.0.0.1:1"], tmp_path, gpus=gpus, is_small=small)
        keys |= {"rollout.ahead": 1, "run.name": "ahead-1"}
        config = load("alfworld-grpo-paw", {key: str(value) for key, value in keys.items()})
        assert config.rollout.ahead == 1
        assert config.engine.transfer == ("nccl" if gpus == 2 else "files")


def run_script(words, log):
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(first_hour.ROOT)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


@pytest.mark.slow
def test_an_update_on_a_cpu_fills_its_row(tmp_path, monkeypatch):
    """The same command as on a GPU, with a tiny model, in a child that has loaded torch."""

    def run_forked(command, log, *, minutes):
        child = CONTEXT.Process(target=run_script, args=(command[1:], log))
        child.start()
        child.join(60 * minutes)
        return child.exitcode, ""

    monkeypatch.setattr(first_hour, "run_process", run_forked)
    (plain,) = [p for p in parts_module.parts("quickstart") if "neither" in p.cases]
    rows = first_hour.run(plain, tmp_path)
    assert [row.reason for row in rows] == [""] * 4
    assert all(row.value > 0 for row in rows)
    by_measure = {row.measure: row.value for row in rows}
    tokens = 64 * (96 + 32 + 8 + 4 + 4)
    assert by_measure["tokens"] * by_measure["update"] == pytest.approx(tokens)


def test_the_page_says_what_the_plans_of_its_runs_predict(tmp_path, monkeypatch, capsys):
    page = first_hour.PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^paw (plan .*?[^\\])$", page.replace("\\\n", ""), flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert len(commands) == 2
    for step, command in enumerate(commands, 4):
        seconds = []
        for card in ("24GB", "80GB"):
            assert main(shlex.split(command.replace("24GB", card))) == 0
            predicted = re.search(
                r"^(\d+) s an update", capsys.readouterr().out, flags=re.MULTILINE
            )
            assert predicted
            seconds.append(int(predicted[1]))
        config = load(shlex.split(command)[-1])
        minutes = [round(config.run.updates * value / 60) for value in seconds]
        assert f"| {seconds[0]} / {seconds[1]} | {minutes[0]} / {minutes[1]} |" in page
        assert re.search(rf"^paw train {shlex.split(command)[-1]}$", page, flags=re.MULTILINE)
        assert f"[{step}. " in page


def test_the_page_says_when_each_part_is_stopped():
    page = first_hour.PAGE.read_text(encoding="utf-8")
    for part in parts_module.parts():
        name = part.name.partition(" of ")[0].partition(",")[0]
        name = "server" if "server" in part.name else name
        row = re.search(
            rf"^\| {name}(?:, six cases)? \| .* \| (\d+)(?: each)? \|$", page, re.MULTILINE
        )
        assert row and int(row[1]) == part.minutes, part.name
    assert len(parts_module.UPDATE_KEYS) == 6
