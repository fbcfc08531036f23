"""A server that misbehaves as a test tells it to."""

import pytest


@pytest.fixture
def server():
    from scripted_server import serve

    with serve() as state:
        yield state
