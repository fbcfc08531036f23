"""A server that misbehaves as a test tells it to."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Attacks wait for deadlines and processes: `make test` runs them, `make check` does not."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("slow")


@pytest.fixture
def server():
    from scripted_server import serve

    with serve() as state:
        yield state
