"""bench/trainer/: an update of given samples, with and without the world model; what a short run
prints."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.mark.slow
def test_an_update_with_the_world_model_has_another_gradient(tiny_llm, tmp_path, monkeypatch):
    update = importlib.import_module("bench.trainer.update")
    against_trl = importlib.import_module("bench.trainer.against_trl")
    for owner, name in (
        (update.learn, "clip_grad_norm_"),
        (update.losses, "token_loss"),
        (update.losses, "token_stats"),
        (update.torch.Tensor, "backward"),
    ):
        # The meter's clocks go with the test.
        monkeypatch.setattr(owner, name, getattr(owner, name))
    model = tiny_llm(tmp_path / "model")
    samples = against_trl.make_samples("turns", vocabulary=100)
    with update.trainer(str(model), threads=1) as (run, meter):
        update.score(run, samples)
        update.choose(samples)
        without = meter.measure(lambda: update.update(run, samples, paw=False))
        with_paw = meter.measure(lambda: update.update(run, samples, paw=True))
    assert without["loss"] == pytest.approx(with_paw["loss"], abs=1e-6)
    assert without["grad_norm"] != pytest.approx(with_paw["grad_norm"], rel=1e-5)
    parts = [with_paw[f"{part}_s"] for part in ("body", "head", "optimizer")]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) <= with_paw["seconds"]


def test_the_masked_observations_of_a_single_update_are_shown(capsys):
    masked = importlib.import_module("bench.trainer.masked")
    counts = dict.fromkeys(masked.COUNTS, 1) | {"tokens": 20, "selected": 4, "skipped": 5}
    masked.show_ends([{"update": 1, **counts}])
    first, last = capsys.readouterr().out.splitlines()
    assert first == last
    assert first.startswith("updates 1 to 1: 4 selected, {'masked': '25.0%', ")
    assert first.endswith("tokens of the update 25.0%")
