"""`pytest --workers`: forked workers report what an ordinary run of the same tests would."""

import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
CONFTEST = """
from pathlib import Path

import pytest
from forked_workers import ForkedWorkers


def pytest_configure(config):
    workers = ForkedWorkers(2, lambda item: item.path.name, after_fork=lambda: None)
    config.pluginmanager.register(workers)


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    with (tmp_path_factory.getbasetemp() / "log").open("a") as file:
        yield lambda line: print(line, file=file, flush=True)
        print("session ends", file=file)


@pytest.fixture(scope="module")
def shared(log):
    yield log
    log("module ends")
"""
FIRST = """
import os
import warnings

import pytest


def test_passes(shared):
    warnings.warn("a warning of the first")
    shared("first")


def test_fails(shared):
    print("what it printed")
    numbers = [1, 2]
    assert numbers == [1, 3]


def test_is_skipped():
    pytest.skip("not here")


def test_ends_its_process():
    os._exit(7)


def test_runs_in_another_process(shared):
    shared("after the crash")
"""
SECOND = """
import pytest


@pytest.fixture
def broken():
    yield
    raise OSError("broken pipe")


@pytest.mark.parametrize("number", range(3))
def test_numbers(shared, number):
    shared(f"second {number}")


def test_cannot_be_torn_down(broken): ...
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)

    def run(*words):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null"]
        command += ["--rootdir", ".", "-o", f"pythonpath={SUPPORT}", "--basetemp", "base", *words]
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return finished.returncode, finished.stdout + finished.stderr

    return run


def test_all_results_come_from_the_workers(run, tmp_path):
    code, output = run("-rA")
    assert code == 1, output
    assert "2 failed, 6 passed, 1 skipped, 1 warning, 1 error" in output, output
    assert "assert [1, 2] == [1, 3]" in output
    assert "what it printed" in output
    assert "UserWarning: a warning of the first" in output
    assert "FAILED test_first.py::test_ends_its_process - its process ended with exit code 7" in (
        output
    )
    assert "ERROR test_second.py::test_cannot_be_torn_down - OSError: broken pipe" in output

    lines = (tmp_path / "base" / "log").read_text().splitlines()
    assert [line for line in lines if "second" in line] == ["second 0", "second 1", "second 2"]
    # The process that has crashed tears nothing down.
    assert lines.count("module ends") == 2
    assert lines.count("session ends") == 2
    assert lines.index("first") < lines.index("after the crash")


def test_the_first_failure_ends_a_run_with_x(run, tmp_path):
    # A worker may begin its next test before it hears of the failure.
    code, output = run("-x", "test_first.py", "-k", "not ends_its_process")
    assert code == 1
    assert "1 failed, 1 passed" in output
    assert "stopping after 1 failures" in output
    lines = (tmp_path / "base" / "log").read_text().splitlines()
    assert lines[0] == "first"
    assert lines[-1] == "session ends"
