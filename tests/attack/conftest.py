"""Attacks are slow tests. Many of them script the answers of a server."""

from pathlib import Path

import pytest
from scripted_server import serve


def pytest_collection_modifyitems(items):
    """Mark attacks as slow because they wait for deadlines and processes. `make test` runs them,
    `make check` does not."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("slow")


@pytest.fixture
def server():
    """A server whose answers the test scripts."""
    with serve() as state:
        yield state
