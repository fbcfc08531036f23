"""Attacks are slow tests, and many of them script what a server answers."""

from pathlib import Path

import pytest
from scripted_server import serve


def pytest_collection_modifyitems(items):
    """Attacks wait for deadlines and processes: `make test` runs them, `make check` does not."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("slow")


@pytest.fixture
def server():
    """A server that answers as a test tells it to."""
    with serve() as state:
        yield state
