"""The short form of `make soak`."""

import pytest
import soak

pytestmark = pytest.mark.slow
UPDATES, FAULTS = 12, 6


def test_faults_at_random_moments_change_nothing(paw_env, tiny_llm, tmp_path):
    model = tiny_llm(tmp_path / "model")
    held = soak.calm(tmp_path / "calm", model, updates=UPDATES, env=paw_env)
    assert held[-1][1] <= held[1][1] + 2 and held[-1][2] <= held[1][2] + 2
    struck = soak.disturbed(tmp_path / "other", model, updates=UPDATES, faults=FAULTS, seed=7, env=paw_env)
    assert sum(struck.values()) >= 4 and struck["kill"] and len(struck) > 1
    soak.assert_same(tmp_path / "calm" / soak.NAME, tmp_path / "other" / soak.NAME)
