"""`pytest --workers 3`: tests in processes that are forked when everything is imported and collected.

Importing torch and transformers and collecting the tests takes longer than most files of tests do.
Here that happens once. Each file (or group of files) runs in one process, which gets the next file
when it has finished one, so what a file's tests share is made once.
"""

import atexit
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol

PATIENCE = 5.0
"""Seconds that an interrupted worker has for ending, before it is told to, and then killed."""


class Worker:
    """A forked process, as the controller sees it."""

    def __init__(self, pid: int, connection: Connection, items: Sequence[pytest.Item]) -> None:
        self.pid = pid
        self.connection = connection
        self.pending = deque(items)
        """Tests of its file that it has not reported; it runs the first."""
        self.exit_code: int | None = None

    def give(self, items: Sequence[pytest.Item], numbers: dict[pytest.Item, int]) -> None:
        """Hand over the tests of another file; none: it ends."""
        self.pending.extend(items)
        with suppress(OSError):  # it has crashed, which the next look at it shows
            self.connection.send([numbers[item] for item in items])

    def has_ended(self, block: bool = False) -> bool:
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, 0 if block else os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code is not None

    def end(self) -> None:
        """Wait for its end, and enforce it."""
        self.connection.close()
        for number in (None, signal.SIGINT, signal.SIGKILL):
            if number and not self.has_ended():
                os.kill(self.pid, number)
            patient_until = time.monotonic() + PATIENCE
            while not self.has_ended() and time.monotonic() < patient_until:
                time.sleep(0.01)


class ForkedWorkers:
    """A plugin that takes the place of pytest's loop over the tests.

    `group_of` names what has to run in one process; equal names follow each other. `after_fork` is
    called in each worker before its first test.
    """

    def __init__(
        self, count: int, group_of: Callable[[pytest.Item], str], after_fork: Callable[[], None]
    ) -> None:
        self.count = count
        self.group_of = group_of
        self.after_fork = after_fork
        self.workers: list[Worker] = []
        self.in_worker = False
        self.reports: list[dict[str, Any]] = []
        """In a worker: those of the test that runs."""
        self.warnings: list[dict[str, Any]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        option = session.config.option
        if session.testsfailed or option.collectonly or option.usepdb:
            return None

        # Made before the fork, so that all workers have the same.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self.numbers = {item: number for number, item in enumerate(session.items)}
        self.groups = deque(list(items) for _, items in groupby(session.items, self.group_of))
        try:
            while self.groups and len(self.workers) < self.count:
                self.fork(session, self.groups.popleft())
            while self.workers:
                self.attend(session)
        finally:
            for worker in self.workers:
                worker.end()

        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def fork(self, session: pytest.Session, items: Sequence[pytest.Item]) -> None:
        near, far = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            near.close()
            for worker in self.workers:
                worker.connection.close()
            self.work(session, far)
        far.close()
        worker = Worker(pid, near, [])
        worker.give(items, self.numbers)
        self.workers.append(worker)

    def attend(self, session: pytest.Session) -> None:
        """Take what the workers have to say, and give them files.

        A worker that has crashed may leave children that hold its end of the pipe, so its end is
        looked for each second as well.
        """
        readable = wait([worker.connection for worker in self.workers], timeout=1)
        for worker in list(self.workers):
            try:
                if worker.connection in readable:
                    self.receive(session, worker, worker.connection.recv())
                elif worker.has_ended() and not worker.connection.poll():
                    self.bury(session, worker)
            except (EOFError, ConnectionError):
                self.bury(session, worker)

    def receive(self, session: pytest.Session, worker: Worker, message: dict[str, Any]) -> None:
        """Pass the reports of one test on, as if it had run here.

        What another test does before its worker hears of a stop does not count.
        """
        if session.shouldfail or session.shouldstop:
            return
        hook = session.config.hook
        for warning in message["warnings"]:
            hook.pytest_warning_recorded.call_historic(kwargs=warning)
        if "error" in message:
            report_failure(session, "fixtures of the session", message["error"])
            return

        item = worker.pending.popleft()
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for data in message["reports"]:
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

        if session.shouldfail or session.shouldstop:
            self.groups.clear()
            for other in self.workers:
                other.give([], self.numbers)
        elif not worker.pending:
            worker.give(self.groups.popleft() if self.groups else [], self.numbers)

    def bury(self, session: pytest.Session, worker: Worker) -> None:
        """A worker has ended. If it was in a test, that has failed, and another worker goes on."""
        worker.has_ended(block=True)
        worker.connection.close()
        self.workers.remove(worker)
        if session.shouldfail or session.shouldstop:
            return
        if worker.exit_code == 0 and not worker.pending:
            return

        name = worker.pending.popleft().nodeid if worker.pending else "fixtures of the session"
        report_failure(session, name, f"its process ended with exit code {worker.exit_code}")
        if session.shouldfail or session.shouldstop:
            return
        if worker.pending:
            self.fork(session, list(worker.pending))
        elif self.groups:
            self.fork(session, self.groups.popleft())

    def work(self, session: pytest.Session, connection: Connection) -> NoReturn:
        """The worker: runs the tests it is given, until it is given none or is told to stop."""
        code = 1
        try:
            self.in_worker = True
            separate_capture(session.config)
            self.after_fork()
            while numbers := connection.recv():
                items = [session.items[number] for number in numbers]
                # After the last, what the file's tests shared is torn down, the session's is not.
                for item, following in zip(items, [*items[1:], session], strict=True):
                    if connection.poll():
                        break
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    connection.send({"reports": self.reports, "warnings": self.warnings})
                    self.reports, self.warnings = [], []
            code = 0
        except (EOFError, ConnectionError, KeyboardInterrupt):
            pass  # the controller has ended, or is about to
        except BaseException:
            traceback.print_exc()
        finally:
            self.leave(session, connection, code)

    def leave(self, session: pytest.Session, connection: Connection, code: int) -> NoReturn:
        try:
            session._setupstate.teardown_exact(None)
        except BaseException:
            with suppress(OSError):
                connection.send({"error": traceback.format_exc(), "warnings": self.warnings})
        finally:
            with suppress(BaseException):
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: Any) -> bool | None:
        """In a worker, a test's reports go to the controller, not to the plugins here."""
        if not self.in_worker:
            return None
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            self.reports.append(data)
        return True

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if self.in_worker:
            words = {"when": when, "nodeid": nodeid, "location": location}
            self.warnings.append(words | {"warning_message": portable(warning_message)})


def report_failure(session: pytest.Session, name: str, text: str) -> None:
    report = pytest.TestReport(
        nodeid=name,
        location=(name.split("::")[0], None, name),
        keywords={},
        outcome="failed",
        longrepr=text,
        when="call",
    )
    session.config.hook.pytest_runtest_logreport(report=report)


def portable(warning: warnings.WarningMessage) -> warnings.WarningMessage:
    """The warning as text, which another process can read."""
    category = warning.category
    try:
        pickle.dumps(category)
    except Exception:  # a class of a test's own
        category = UserWarning
    return warnings.WarningMessage(
        message=str(warning.message),
        category=category,
        filename=warning.filename,
        lineno=warning.lineno,
    )


def separate_capture(config: pytest.Config) -> None:
    """Capture output in files of this process: those from before the fork are the controller's
    too."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
