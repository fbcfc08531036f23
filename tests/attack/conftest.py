"""The way to the small parts that the unit tests play with, to the environments and the server that misbehave."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]


@pytest.fixture
def server():
    from scripted_server import serve

    with serve() as state:
        yield state
