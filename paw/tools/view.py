"""`paw view`: serves the report of runs while they go on, to a browser on this machine.

The page is that of `paw report`. It asks for what its runs have written since, and the server reads
only what was appended. The server sends only four kinds of answers: the list of runs, a run's page,
its new episodes, and one episode. Paths of files never come from a request. A request must name
this machine as its host, so that a page of another site cannot read the answers (DNS rebinding).
"""

import argparse
import ipaddress
import json
import signal
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from paw.errors import UserError, describe, to_stderr
from paw.processes import watcher
from paw.tools.report.episodes import EpisodeIndex
from paw.tools.report.report import Live, render, render_list
from paw.tools.report.rundir import Run, RunReader

MARKS = ("metrics.jsonl", "run.json")
"""Files of which a run's folder has at least one."""
MAX_RUNS = 500
"""Maximum number of runs in the list, the newest first."""
MAX_ROWS = 5_000
"""Maximum number of rows in one answer. The page asks again for the rest."""
MAX_PAGES = 16
"""Maximum number of drawn pages that are kept."""
TIMEOUT_S = 30
"""Seconds after which a silent connection is closed."""


class NotThere(Exception):
    """The requested path names nothing."""


@dataclass
class ViewedRun:
    """A run's directory, as far as it has been read."""

    directory: Path
    reader: RunReader
    episodes: EpisodeIndex
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the files are read."""

    @classmethod
    def of(cls, directory: Path) -> "ViewedRun":
        return cls(directory, RunReader(directory), EpisodeIndex(directory))

    def version(self) -> str:
        """Return a text that changes whenever the metrics or the run's description do."""
        parts: list[str] = []
        for name in MARKS:
            try:
                status = (self.directory / name).stat()
            except OSError:
                parts.append("-")
            else:
                parts.append(f"{status.st_ino:x}.{status.st_size:x}.{status.st_mtime_ns:x}")
        return "_".join(parts)


class Views:
    """The runs that are served: one, or all in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_one_run = is_run(root)
        self._runs: dict[str, ViewedRun] = {}
        self._lock = threading.Lock()
        self._drawing = threading.Lock()
        """Held while a page is drawn, because matplotlib's settings are global."""
        self._pages: dict[tuple[str, ...], tuple[list[str], str]] = {}
        """(versions that it shows, page) by names of runs."""

    def directories(self) -> dict[str, Path]:
        """Return the folders of the runs by name, the one written to last first."""
        if self.is_one_run:
            return {self.root.resolve().name: self.root}
        found: list[tuple[float, Path]] = []
        try:
            for path in self.root.iterdir():
                if not path.name.startswith(".") and is_run(path):
                    found.append((_changed_at(path), path))
        except OSError:  # it was deleted or renamed
            return {}
        found.sort(key=lambda item: -item[0])
        return {path.name: path for _, path in found[:MAX_RUNS]}

    def run(self, name: str) -> ViewedRun:
        """Return a run by its name in the list. Raises NotThere if it is not in it."""
        directory = self.directories().get(name)
        if directory is None:
            raise NotThere
        with self._lock:
            return self._runs.setdefault(name, ViewedRun.of(directory))

    def list_page(self) -> str:
        """Return the page with the list of runs."""
        entries: list[tuple[str, str, float]] = []
        for name, path in self.directories().items():
            entries.append((name, _url(name), _changed_at(path)))
        return render_list(entries, folder=str(self.root))

    def run_page(self, names: list[str]) -> str:
        """Return the page of a run, or of several that are compared.

        It is drawn again only if metrics have been written since.
        """
        viewed = [self.run(name) for name in names]
        with self._drawing:
            versions = [run.version() for run in viewed]
            shown_versions, page = self._pages.get(tuple(names), ([], ""))
            if shown_versions == versions:
                return page
            runs: list[Run] = []
            for run in viewed:
                with run.lock:
                    runs.append(run.reader.read())
            live = Live(urls=[_url(name) for name in names], versions=versions)
            page = render(runs, [run.episodes for run in viewed], live=live)
            if len(self._pages) >= MAX_PAGES:
                self._pages.clear()
            self._pages[tuple(names)] = (versions, page)
        return page

    def changes(self, name: str, *, generation: int, start: int) -> dict[str, Any]:
        """Return the rows of a run's episodes from number `start` on, and the run's version.

        Returns all rows if `generation` is not theirs. It changes when a run is resumed.
        """
        viewed = self.run(name)
        with viewed.lock:
            episodes = viewed.episodes
            episodes.update()
            if generation != episodes.generation:
                start = 0
            rows = episodes.rows[max(0, start) :][:MAX_ROWS]
            return {"generation": episodes.generation, "rows": rows, "version": viewed.version()}

    def episode(self, name: str, row_id: str) -> dict[str, Any]:
        """Return an episode in full. Raises NotThere if there is none with this id."""
        viewed = self.run(name)
        with viewed.lock:
            detail = viewed.episodes.detail(row_id)
        if detail is None:
            raise NotThere
        return detail


def _url(name: str) -> str:
    """Return the path of a run's page."""
    return f"/run/{quote(name, safe='')}/"


def is_run(directory: Path) -> bool:
    return directory.is_dir() and any((directory / name).is_file() for name in MARKS)


def _changed_at(directory: Path) -> float:
    """Return when a run's log was last written, seconds since the epoch; 0 if unknown."""
    for name in MARKS:
        try:
            return (directory / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests from `views`."""

    views: Views
    any_host: bool
    """Whether a request may name any host, because --host opened the server to other machines."""
    protocol_version = "HTTP/1.1"
    server_version = "paw"
    sys_version = ""
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        if not self.any_host and not is_this_machine(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "this server answers to localhost only")
            return
        try:
            kind, text = self._answer()
        except NotThere:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing here")
        except Exception as error:  # a run's files may hold anything; other requests go on
            to_stderr(f"paw view: {self.path[:200]!r}: {describe(error)}")
            problem = f"cannot be shown: {describe(error)}"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", problem)
        else:
            self._send(HTTPStatus.OK, kind, text)

    def _answer(self) -> tuple[str, str]:
        """Return (content type, text) for the request. Raises NotThere for any unknown path."""
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        if url.path == "/":
            return "text/html", self._front_page()
        if url.path == "/compare":
            names = parse_qs(url.query).get("run", [])[:6]
            if not names:
                raise NotThere
            return "text/html", self.views.run_page(names)

        parts = url.path.split("/")
        if len(parts) != 4 or parts[1] != "run":
            raise NotThere
        name = unquote(parts[2])
        match parts[3]:
            case "":
                return "text/html", self.views.run_page([name])
            case "changes":
                generation = whole_number(query.get("generation", ""))
                start = whole_number(query.get("from", ""))
                changes = self.views.changes(name, generation=generation, start=start)
                return "application/json", json.dumps(changes)
            case "episode":
                return "application/json", json.dumps(self.views.episode(name, query.get("id", "")))
        raise NotThere

    def _front_page(self) -> str:
        if self.views.is_one_run:
            return self.views.run_page(list(self.views.directories()))
        return self.views.list_page()

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""


class Server(ThreadingHTTPServer):
    """An HTTP server whose connections do not keep it from ending."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing for a client that went away."""


def whole_number(text: str) -> int:
    """Return a whole number of at least 0; 0 for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def is_this_machine(host: str) -> bool:
    """Whether a Host header names this machine: localhost or a loopback address, any port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        return ipaddress.ip_address(name).is_loopback
    except ValueError:  # not a host, or not an address
        return False


def make_server(root: Path, *, host: str = "127.0.0.1", port: int = 0) -> Server:
    """Make a server of the runs at `root`, a run's directory or a folder of runs.

    Port 0 takes a free one. Raises UserError if there is no such folder, or the address cannot be
    used.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; give a run's directory, or a folder of runs")
    views = Views(root.absolute())
    if not views.is_one_run and not views.directories():
        raise UserError(
            f"{root}: no run in it; give a run's directory, or a folder of runs such as runs/"
        )
    settings = {"views": views, "any_host": not is_this_machine(host)}
    handler = type("BoundHandler", (Handler,), settings)
    try:
        return Server((host, port), handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"paw view: --host {host} --port {port}: {error}") from None


def run(options: argparse.Namespace, _: object) -> int:
    """Serve the runs until Ctrl-C or SIGTERM."""
    server = make_server(options.run_dir, host=options.host, port=options.port)
    host, port = server.server_address[:2]

    def end(*_: object) -> None:
        watcher.say_heard()
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    to_stderr(f"http://{host}:{port}/ shows {options.run_dir}; Ctrl-C ends")
    with server:
        server.serve_forever(poll_interval=0.2)
    return 0
