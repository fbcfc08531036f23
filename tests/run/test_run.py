"""A run between its updates: what it times, publishes and remembers."""

from types import SimpleNamespace

import torch
from test_update import make_config, start  # noqa: F401

from paw.run import open_run


def test_a_stage_publishes_what_has_been_written_and_a_clock_does_not(start, tmp_path):  # noqa: F811
    published = []
    with open_run(make_config(start, tmp_path)) as run:
        run.pending = SimpleNamespace(step=0, done=True, publish=published.append)
        with run.clock("score"):
            assert not published
            assert run.phase == "score"
        run.pending.done = False
        with run.stage("score"):
            assert not published
        run.pending.done = True
        with run.stage("update"):
            assert published == [run.config.run.keep]
            assert run.pending is None
            assert run.phase == "update"
        assert {"time/score", "time/update", "time/save"} <= run.metrics.keys()


def test_an_update_that_is_counted_keeps_its_random_states(start, tmp_path):  # noqa: F811
    """Random numbers that are drawn while weights are sent, or in an evaluation that fails, are
    drawn again."""
    with open_run(make_config(start, tmp_path)) as run:
        expected = torch.get_rng_state()
        run.count_update()
        torch.rand(3)
        assert run.step == 1
        tensors, _ = run.random_states
        assert torch.equal(tensors["torch"], expected)
