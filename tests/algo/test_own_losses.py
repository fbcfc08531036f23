"""Custom losses and estimators: the examples of docs/algorithm.md train, checked and fused like the
built-in ones."""

from functools import partial
from pathlib import Path

import pytest
import torch
from joint import Objective, gradients, make_rows, relative, tiny_policy
from test_update import make_config, run_updates, start  # noqa: F401

from paw.algo import loss as losses
from paw.algo.batches import collate
from paw.config.plugins import import_file
from paw.errors import UserError
from paw_kernels import token_stats

PAGE = Path(__file__).parents[2] / "docs" / "algorithm.md"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """The page's examples, in a file."""
    file = tmp_path_factory.mktemp("own") / "own.py"
    parts = PAGE.read_text(encoding="utf-8").split("```python\n")[1:]
    file.write_text("\n".join(part.split("```")[0] for part in parts))
    return file


@pytest.mark.slow
def test_the_examples_of_the_page_train(start, page_file, tmp_path):  # noqa: F811
    """One update each way: the same with a built-in loss by its path, another one with a custom
    loss."""

    def weights(**settings):
        config = make_config(start, tmp_path / str(len(list(tmp_path.iterdir()))), **settings)
        weights_by_update, _, metrics = run_updates(config, 1)
        assert metrics[-1]["wm/loss"] > 0
        assert metrics[-1]["optim/grad_norm"] > 0
        return torch.cat([value.flatten() for value in weights_by_update[-1].values()])

    plain = weights()
    assert torch.equal(
        weights(policy_loss="paw.algo.loss:ppo", wm_loss="paw.algo.loss:cmae"), plain
    )
    assert torch.equal(weights(advantage_type="paw.algo.advantages:grpo"), plain)
    sharp = weights(
        policy_loss=f"{page_file}:soft_clip", policy_width=0.1, wm_loss=f"{page_file}:focal"
    )
    assert not torch.equal(sharp, plain)
    assert not torch.equal(
        weights(
            policy_loss=f"{page_file}:soft_clip", policy_width=0.3, wm_loss=f"{page_file}:focal"
        ),
        sharp,
    )
    assert not torch.equal(
        weights(advantage_type=f"{page_file}:robust", advantage_floor=0.1), plain
    )


ESTIMATORS = """
from paw.algo.gae import gae
from paw.config import estimator


@estimator(needs="nothing")
def alone(samples):
    return [sample.score for sample in samples]


@estimator(needs="critic")
def judged(values, score, *, gamma: float = 1.0, lam: float = 1.0):
    return gae(values, score, gamma=gamma, lam=lam)


@estimator(needs="critic")
def short(values, score):
    return [score]
"""


@pytest.mark.slow
def test_an_estimator_that_needs_no_groups_trains_on_one_episode_a_task(start, tmp_path):  # noqa: F811
    """With what it declares: by itself, or with a critic, like PPO."""
    own = tmp_path / "own.py"
    own.write_text(ESTIMATORS)

    def weights(name, run, **settings):
        settings = {"rollout_tasks": 8, "rollout_group_size": 1, "wm_enabled": False, **settings}
        config = make_config(start, tmp_path / run, advantage_type=name, **settings)
        found, _, metrics = run_updates(config, 1)
        assert metrics[-1]["optim/grad_norm"] > 0
        return torch.cat([value.flatten() for value in found[-1].values()])

    weights(f"{own}:alone", "alone")
    ppo = weights("ppo", "ppo", critic_lr=3e-3)
    assert torch.equal(weights(f"{own}:judged", "judged", critic_lr=3e-3), ppo)
    with pytest.raises(UserError, match=r"returned 1 numbers for \d+ tokens"):
        weights(f"{own}:short", "short")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wm_loss": "cmea"}, "did you mean 'cmae'"),
        ({"policy_loss": "no_module_here:loss"}, "No module named 'no_module_here'"),
        ({"wm_loss": "paw.algo.loss:focal"}, "has no 'focal'"),
        ({"wm_loss": "OWN:focal", "wm_gama": 1.0}, "unknown key"),
        ({"wm_loss": "OWN:focal", "wm_gamma": "much"}, "wm.gamma"),
        ({"wm_gamma": 1.0}, "unknown key"),
    ],
)
def test_a_name_or_a_setting_that_is_not_there_is_one_line(
    start,  # noqa: F811
    page_file,
    tmp_path,
    settings,
    message,
):
    settings = {key: str(value).replace("OWN", str(page_file)) for key, value in settings.items()}
    with pytest.raises(UserError, match=message) as error:
        make_config(start, tmp_path, **settings)
    assert "\n" not in str(error.value)


def test_the_gradient_is_that_of_autograd_through_the_statistics(page_file):
    """Fused, against token_stats and autograd, for ours and for the page's."""
    module = import_file(str(page_file), "")
    policy = tiny_policy()
    rows = make_rows(policy, reference=True)
    batch = collate(
        rows, [[i] for i in range(len(rows))], with_observation=True, device=torch.device("cpu")
    )
    tokens = Objective(kl_coef=0.1).tokens(batch, rows, len(rows))
    for policy_loss, wm_loss in (
        (losses.ppo, losses.cmae),
        (module.soft_clip, partial(module.focal, gamma=1.0)),
    ):
        loss = losses.joint(policy_loss, wm_loss, kl_coef=0.1, entropy_coef=0.01)
        losses.joint_loss(policy, batch, tokens, loss, temperature=0.7).loss.backward()
        fused = gradients(policy)
        hidden = policy.hidden(batch.input_ids, batch.lengths)[batch.position]
        stats = token_stats(hidden, policy.head_weight, batch.target, **policy.head_options(0.7))
        loss(*stats, tokens).sum().backward()
        assert relative(fused, gradients(policy)) < 1e-5
        assert fused.norm() > 0


@pytest.mark.parametrize(
    ("key", "code", "message"),
    [
        (
            "policy_loss",
            "return logp.mean()",
            r"policy.loss must return one number for each token, torch.float32 of",
        ),
        (
            "wm_loss",
            "return logp[:1]",
            r"wm.loss must return one number for each token.*not torch.float32 of shape",
        ),
        ("policy_loss", "return 1.0", "policy.loss must return one number for each token.*not 1.0"),
        ("advantage_type", "return [1.0]", r"returned 1 numbers for \d+ samples"),
        (
            "advantage_type",
            "return [float('nan') for _ in samples]",
            r"returned nan for \d+ of \d+ samples",
        ),
        ("advantage_type", "return None", "must return a number for each sample, not None"),
        (
            "policy_loss",
            "missing = 1",
            "policy.loss must return one number for each token.*not None",
        ),
    ],
)
def test_what_is_no_answer_is_one_line(start, tmp_path, key, code, message):  # noqa: F811
    file = tmp_path / "own.py"
    takes = "samples" if key == "advantage_type" else "logp, entropy, batch"
    file.write_text(f"def answer({takes}):\n    {code}\n")
    with pytest.raises(UserError, match=message):
        run_updates(make_config(start, tmp_path, **{key: f"{file}:answer"}), 1)


def test_a_module_is_no_loss(start, tmp_path):  # noqa: F811
    (tmp_path / "own.py").write_text("import math\n")
    with pytest.raises(UserError, match="is a module, not a function or class"):
        make_config(start, tmp_path, policy_loss=f"{tmp_path / 'own.py'}:math")


def test_a_loss_of_entropy_alone_trains(start, tmp_path):  # noqa: F811
    (tmp_path / "own.py").write_text("def sharpen(logp, entropy, batch):\n    return entropy\n")
    _, _, metrics = run_updates(
        make_config(start, tmp_path, policy_loss=f"{tmp_path / 'own.py'}:sharpen"), 1
    )
    assert metrics[-1]["optim/grad_norm"] > 0
    assert metrics[-1]["policy/loss"] > 0
