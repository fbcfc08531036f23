"""PPO: advantages and the critic against the reference code, by hand, and against plain
autograd."""

import copy
import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from joint import gradients, make_row, relative
from test_samples import conversation, samples_of
from test_update import make_config, run_updates, start  # noqa: F401

from paw.algo.gae import gae, whiten
from paw.algo.packing import Packing
from paw.config.recipe import load
from paw.distributed.ranks import Ranks
from paw.errors import UserError
from paw.guards import TrainingStopped
from paw.model.critic import Critic, load_critic, value_loss
from paw.model.loading import load_policy
from paw.run import open_run

PARITY = Path(__file__).parents[2] / ".." / "shared" / "data" / "parity" / "losses.json"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "data", json.loads(PARITY.read_text()) if PARITY.exists() else [], ids=lambda _: ""
)
def test_advantages_returns_and_value_loss_match_the_reference_code(data):
    expected = data["expected"]
    lengths = [int(sum(mask)) for mask in data["mask"]]

    def without_padding(table):
        return [row[:length] for row, length in zip(table, lengths, strict=True)]

    values = without_padding(data["values"])
    predictions = without_padding(data["value_predictions"])
    rewards = without_padding(data["token_rewards"])
    whitened = without_padding(expected["gae_whitened"])
    returns = without_padding(expected["returns"])
    gradient = without_padding(expected["d_value_loss_d_prediction"])
    advantages = [
        gae(value_row, reward_row[-1], gamma=1.0, lam=1.0)
        for value_row, reward_row in zip(values, rewards, strict=True)
    ]
    for ours, theirs in zip(whiten([np.array(row) for row in advantages]), whitened, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-6)
    for advantage_row, value_row, theirs in zip(advantages, values, returns, strict=True):
        assert [
            left + right for left, right in zip(advantage_row, value_row, strict=True)
        ] == pytest.approx(theirs, abs=3e-6)

    def flat(table):
        return torch.tensor(list(itertools.chain(*table)))

    predicted = flat(predictions).requires_grad_()
    loss = value_loss(predicted, flat(values), flat(returns), clip=0.5)[0].mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected["value_loss"], rel=1e-5)
    assert predicted.grad.tolist() == pytest.approx(list(itertools.chain(*gradient)), abs=2e-6)


def test_gae_by_hand():
    """Values 1, 2, 4 and a score of 10 with the last token."""
    assert gae([1.0, 2.0, 4.0], 10.0, gamma=1.0, lam=1.0) == [9.0, 8.0, 6.0]  # score - value
    # lambda = 0: the steps of the value alone, 2 - 1, 4 - 2, 10 - 4
    assert gae([1.0, 2.0, 4.0], 10.0, gamma=1.0, lam=0.0) == [1.0, 2.0, 6.0]
    # gamma 0.9, lambda 0.5: deltas 0.9 2 - 1 = 0.8, 0.9 4 - 2 = 1.6, 6; A = 6, 1.6 + 0.45 6, 0.8 +
    # 0.45 4.3
    assert gae([1.0, 2.0, 4.0], 10.0, gamma=0.9, lam=0.5) == pytest.approx([2.735, 4.3, 6.0])


def test_whitening_by_hand():
    """Mean 2, unbiased variance (1 + 0 + 1) / 2."""
    first, second = whiten([np.array([1.0]), np.array([2.0, 3.0])])
    assert first.tolist() == pytest.approx([-1.0])
    assert second.tolist() == pytest.approx([0.0, 1.0])
    assert whiten([np.array([5.0])])[0].tolist() == [0.0]
    assert whiten([]) == []
    # The eps stands under the root, unlike that of the group estimators: var 2e-8, so 1e-4 /
    # sqrt(3e-8).
    assert whiten([np.array([0.0, 2e-4])])[0][1] == pytest.approx(1e-4 / math.sqrt(3e-8))


def test_the_value_clip_by_hand():
    """Old value 0, clip 0.5, return 3: the clipped term is the larger at 1 and 4, not at -1 and
    0.4."""
    values = torch.tensor([1.0, 4.0, -1.0, 0.4], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(4), torch.full((4,), 3.0), clip=0.5)
    # max((1 - 3)^2, (0.5 - 3)^2), max(1, 2.5^2), max(16, 3.5^2), 2.6^2
    assert loss.tolist() == pytest.approx([6.25, 6.25, 16.0, 6.76])
    assert clipped.tolist() == [True, True, False, False]
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, 0.0, -8.0, -5.2])


@pytest.fixture
def critic(start, tmp_path):  # noqa: F811
    return make_critic(start, tmp_path)


def make_critic(start, folder, **changes):  # noqa: F811
    options = {"advantage_type": "ppo", "critic_lr": 1e-2, **changes}
    config = make_config(start, folder, **options)
    model = load_critic(str(start))
    return Critic(model, config, Ranks(), Packing.of(config.optim, model))


def judged_rows(critic, rows=None, seed=0):
    """Rows with values of a random head, and returns that differ from them."""
    rng = random.Random(seed)
    rows = rows or [make_row(rng, penalty=0.0) for _ in range(24)]
    with torch.no_grad():
        for parameter in critic.model.lm.get_output_embeddings().parameters():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(seed))
    critic.compute_values(rows)
    for row in rows:  # as if the critic had moved on since
        row.values = [value + rng.gauss(0, 0.5) for value in row.values]
    return rows


def dense(critic, rows):
    """(values of each row, gradient, loss) in float64, row by row, using only the body and the
    definition."""
    model = copy.deepcopy(critic.model.lm).double()
    head = model.get_output_embeddings()
    clip = critic.config.critic.value_clip
    tokens = sum(len(row.response_ids) for row in rows)
    values_of_rows = []
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        packed = {"output_hidden_states": True, "use_cache": False}
        model.set_attn_implementation("sdpa")
        hidden = model(input_ids=ids, **packed).hidden_states[-1][0]
        first_position = len(row.prompt_ids) - 1
        values = (
            hidden[first_position : first_position + len(row.response_ids)] @ head.weight.T
            + head.bias
        )[:, 0]
        values_of_rows.append(values.tolist())
        for value, old_value, target in zip(values, row.values, row.returns, strict=True):
            clipped = min(
                max(value, torch.tensor(old_value - clip)), torch.tensor(old_value + clip)
            )
            total = total + max((value - target) ** 2, (clipped - target) ** 2) / tokens
    total.backward()
    return values_of_rows, gradients(model), float(total.detach())


@pytest.mark.parametrize(
    "rows", [None, samples_of(conversation(turns=3))], ids=["one by one", "conversations"]
)
@pytest.mark.parametrize("budget", [20, 10**6])
def test_values_loss_and_gradient_are_those_of_plain_autograd(
    start,  # noqa: F811
    tmp_path,
    budget,
    rows,
):
    """Also for samples that share a sequence."""
    critic = make_critic(start, tmp_path, optim_micro_batch_tokens=budget, optim_grad_clip=1e9)
    rows = judged_rows(critic, copy.deepcopy(rows))
    values, expected, loss = dense(critic, rows)
    optimizer = critic.optimizer
    formed = []
    optimizer.step = lambda: formed.append([p.grad.clone() for p in critic.model.parameters()])
    metrics = critic.optimize([rows])
    for parameter, gradient in zip(critic.model.parameters(), formed[0], strict=True):
        parameter.grad = gradient
    assert relative(gradients(critic.model), expected) < 1e-6
    assert metrics["critic/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-5)
    assert 0 < metrics["critic/clip_frac"] < 1
    critic.compute_values(rows)
    for row, theirs in zip(rows, values, strict=True):
        assert row.values == pytest.approx(theirs, abs=1e-5)


def test_the_head_starts_at_zero_and_the_critic_learns_the_returns(critic):
    rng = random.Random(1)
    rows = [make_row(rng) for _ in range(16)]
    metrics = critic.compute_values(rows)
    assert metrics == {"critic/explained_variance": pytest.approx(0.0)}
    assert all(row.values.tolist() == [0.0] * len(row.response_ids) for row in rows)
    scores = [np.full(len(row.response_ids), row.score) for row in rows]
    for row, returns, advantages in zip(rows, scores, whiten(scores), strict=True):
        assert row.returns.tolist() == returns.tolist()
        assert row.token_advantage.tolist() == advantages.tolist()
    history = [critic.compute_values(rows) | critic.optimize([rows]) for _ in range(20)]
    assert history[-1]["critic/loss"] < 0.2 * history[0]["critic/loss"]
    assert critic.compute_values(rows)["critic/explained_variance"] > 0.5


def test_scores_that_are_all_zero_have_no_advantage(critic):
    rows = [replace(make_row(random.Random(i)), score=0.0) for i in range(12)]
    assert critic.compute_values(rows) == {}
    for row in rows:
        assert not row.token_advantage.any()


def test_an_update_trains_policy_and_critic(start, tmp_path):  # noqa: F811
    options = {
        "advantage_type": "ppo",
        "critic_lr": 1e-3,
        "rollout_tasks": 12,
        "rollout_group_size": 1,
    }
    config = make_config(start, tmp_path, **options)
    weights, groups, metrics = run_updates(config, 2)
    for group in groups:
        assert [len(trajectories) for trajectories in group] == [1] * len(group)
    initial = load_policy(start).named_parameters_once()
    assert any(not torch.equal(weights[0][name], parameter) for name, parameter in initial.items())
    assert metrics[0]["critic/loss"] > 0
    assert metrics[0]["critic/grad_norm"] > 0
    assert 0.0 <= metrics[0]["critic/clip_frac"] <= 1.0
    assert metrics[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[1]["critic/explained_variance"] != 0.0
    assert metrics[0]["wm/loss"] > 0  # PaW beside it, lambda_g from groups of one


def test_a_run_without_a_critic_cannot_get_one(start, tmp_path):  # noqa: F811
    with open_run(make_config(start, tmp_path)) as run:
        run.save()
    ppo = make_config(start, tmp_path, advantage_type="ppo")
    with (
        pytest.raises(
            UserError, match=r"advantage\.type = 'grpo', not 'ppo': its checkpoints hold no critic"
        ),
        open_run(ppo, resume="auto"),
    ):
        pass


def test_numbers_that_are_not_finite_reach_no_weight(critic):
    rows = judged_rows(critic)
    before = [parameter.clone() for parameter in critic.model.parameters()]
    rows[3].returns[0] = math.nan
    metrics = critic.optimize([rows, rows])
    assert critic.guard.skipped == 2
    assert "critic/grad_norm" not in metrics
    assert all(
        torch.equal(parameter_before, parameter_now)
        for parameter_before, parameter_now in zip(before, critic.model.parameters(), strict=True)
    )
    with pytest.raises(TrainingStopped, match=r"lower critic\.lr"):
        critic.optimize([rows])
    with torch.no_grad():
        critic.model.lm.get_output_embeddings().bias.fill_(math.inf)
    with pytest.raises(TrainingStopped, match=r"the critic's values are not finite"):
        critic.compute_values(rows)


def test_lora_with_ppo_is_refused():
    with pytest.raises(UserError, match=r"lora\.rank with advantage\.type = 'ppo'") as error:
        load("alfworld-gigpo-paw", {"advantage.type": "ppo", "lora.rank": "8"})
    assert "\n" not in str(error.value)
