"""Algorithm 1 of PaW (arXiv 2606.02388): policy and world-model co-training, as one loop.

    tasks -> environments x engine -> trajectories -> samples -> advantages -> scoring pass ->
          selection and weights -> packed micro-batches -> fused loss -> optimizer -> weights to the
          engine

It deliberately differs from the reference code: it does not duplicate random samples to fill a
batch, does not generate for finished episodes, and divides by totals over the whole mini-batch
instead of averaging micro-batch means.
"""

import math
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean

import numpy as np

from paw import hooks
from paw.algo.advantages import check_advantages, drop_penalty_only
from paw.algo.rows import compute_by_group, gather_digests, gather_numbers, with_all_rows
from paw.algo.samples import to_samples
from paw.algo.shared_samples import assign, column, held
from paw.algo.world_model import select
from paw.build import WITHOUT_TOOLS, Preparation
from paw.config import plugins
from paw.config.sections import Config
from paw.envs.several import parts_of
from paw.guards import TrainingStopped, alarms, what_is_saved
from paw.learn import optimize
from paw.rollouts.base import RolloutSource, RolloutStats
from paw.rollouts.success import groups_by_environment, success_metrics
from paw.rollouts.sync import StaleWeightsError, push_weights, sampled_by, sampler_mismatch
from paw.run import Run, open_run
from paw.types import Group, Sample, Values, no_ids, no_values

PAUSES_S = (5, 10, 20, 40, 60)
"""Seconds to wait before each replay of an update's failed episodes; over two minutes in all."""


def train(
    config: Config,
    *,
    resume: str = "",
    numbered: bool = False,
    preparation: Preparation = WITHOUT_TOOLS,
) -> Path:
    """Train to config.run.updates and write the run directory. Returns the path of the report.

    `resume` continues a run: "auto" from its newest checkpoint that verifies, or the name of a
    checkpoint, such as "step_000100". With `numbered`, run.name is a stem: if a run NAME exists, a
    new run is named NAME-2, and so on, and `resume` continues the run with the highest number.
    `preparation` comes from the tools (`paw.tools.train.train`). Raises UserError for a user's
    mistake. Checkpoints are kept.
    """
    with open_run(config, resume=resume, numbered=numbered, preparation=preparation) as run:
        with closing(run.make_rollouts()) as rollouts:
            push_weights(run.policy.lm, run.engine, version=run.step, dtype=run.policy.dtype)
            run.catch_up_on_evaluation(rollouts)
            run.choose_missing_shares()
            while run.step < config.run.updates and not run.stop_requested():
                update(run, rollouts)
        return run.finish()


def update(run: Run, rollouts: RolloutSource) -> None:
    """One update: play, prepare samples, optimize, send the weights to the engine, log."""
    groups, stats = rollout(run, rollouts)
    if not groups:  # a stop was requested
        return
    run.engine.sleep()  # until the next weights, because training needs the memory
    run.metrics.update(rollout_metrics(groups + stats.uniform) | stats.metrics())

    if not learn(run, groups):  # servers with stale weights were excluded
        return update(run, rollouts)
    run.count_update()
    with run.stage("sync"):
        push_weights(run.policy.lm, run.engine, version=run.step, dtype=run.policy.dtype)

    run.note_success()
    run.choose_shares()
    run.end_update(rollouts, tokens=stats.prompt_tokens + stats.response_tokens)
    if run.log:
        for warning in alarms(run.log.history, run.config, reward_max=run.factory.reward_max):
            run.say(warning)


def learn(run: Run, groups: list[Group]) -> bool:
    """Turn the groups into samples and take the optimizer steps.

    Returns False if servers that sampled them had different weights. Then those servers are
    excluded, nothing is learnt, and the episodes must be played again.
    """
    if run.episode_log:
        run.episode_log.start(groups)
    try:
        with run.stage("score"), hooks.users_advantages(run.config):
            samples = prepare(run, groups)
        with run.stage("update"), hooks.users_losses(run.config):
            run.metrics.update(optimize(run, samples))
            if run.episode_log:
                run.episode_log.finish(samples)
    except StaleWeightsError as error:
        run.ranks.reshard(run.policy)  # its backward pass will not come
        run.exclude_stale_servers(error)
        return False
    return True


def rollout(run: Run, rollouts: RolloutSource) -> tuple[list[Group], RolloutStats]:
    """Play the update's episodes. Returns them in groups, with statistics of all episodes played.

    Returns no groups if a stop was requested. If failed episodes leave no group, for example while
    a server restarts, the run is saved and the episodes are played again after each of PAUSES_S.
    Raises TrainingStopped if they still fail after the last pause.
    """
    tries: list[RolloutStats] = []
    for pause in (*PAUSES_S, None):
        with run.stage("rollout"):
            groups, stats = rollouts.training(
                run.step, run.config.rollout.tasks, run.progress_callback("episodes")
            )
        tries.append(stats)
        for failure in stats.failures[:3]:
            run.say(f"environment failed: {failure}")
        if groups:
            return groups, RolloutStats.sum(tries)

        if run.saved != run.step:
            run.save()
        if pause is None:
            break
        run.say(
            f"update {run.step + 1}: no group has two episodes left; "
            f"playing them again in {pause} s"
        )
        if _stop_requested_within(run, pause):
            return [], stats
        if any(run.ranks.gather(bool(run.engine.faults))):
            # A server that is back needs the weights.
            push_weights(run.policy.lm, run.engine, version=run.step, dtype=run.policy.dtype)

    reason = stats.failures[0] if stats.failures else "they have no turns"
    raise TrainingStopped(
        f"stopped at update {run.step + 1}: no group has two episodes left in {len(tries)} tries "
        f"({reason}); {what_is_saved(run.saved)}"
    )


def _stop_requested_within(run: Run, seconds: int) -> bool:
    """Wait, but return early if a stop is requested. Returns whether one was."""
    for _ in range(seconds):
        if run.stop_requested():
            return True
        time.sleep(1)
    return False


def prepare(run: Run, groups: list[Group]) -> Sequence[Sample]:
    """Return the update's samples, with advantages, old log-probs and world-model weights.

    With several ranks, each holds a part of them, and has a few numbers of the others
    (`algo.shared_samples`). `groups` is emptied.
    """
    config = run.config
    env_parts = parts_of(run.factory, config.env)
    reward_max = [env_parts[group.task.env].factory.reward_max for group in groups]
    samples = to_samples(
        groups,
        separator_ids=run.chat.separator_ids,
        encode_observation=run.encode_observation if config.wm.enabled else None,
        invalid_penalty={
            label: env_part.factory.invalid_penalty for label, env_part in env_parts.items()
        },
        rank=run.ranks.rank,
        share=run.share_scalars if run.ranks.world_size > 1 else None,
    )
    if run.ranks.world_size > 1:
        groups.clear()  # otherwise they would keep the rows that move to other ranks
    if config.rollout.ahead:
        run.metrics.update(staleness(run, samples))

    compute_advantages(run, samples)
    compute_log_probs(run, samples)
    if config.policy.kl_coef > 0.0:
        compute_reference_log_probs(run, samples)
    if config.wm.enabled:
        select_targets(run, samples, reward_max=reward_max)
    return samples


def staleness(run: Run, samples: Sequence[Sample]) -> dict[str, float]:
    """Return how many updates old the weights were that sampled the tokens."""
    versions = [samples[i].versions for i in held(samples, run.ranks)]
    ages = run.step - np.concatenate([no_ids(), *versions])
    own_numbers = (int(ages.sum()), len(ages), int(ages.max(initial=0)))
    sums, counts, largest = zip(*run.ranks.gather(own_numbers), strict=True)
    return {"staleness/mean": sum(sums) / sum(counts), "staleness/max": max(largest)}


def compute_advantages(run: Run, samples: Sequence[Sample]) -> None:
    """Fill the advantages: relative to the group, or from the critic's values (PPO)."""
    if run.critic:
        run.metrics.update(run.critic.compute_values(samples))
        return
    settings = run.config.advantage
    estimator = plugins.load("advantages", settings.type)

    def compute(subset: Sequence[Sample]) -> list[float]:
        with hooks.users_advantages(run.config):  # its failure on one rank ends all at once
            returned = estimator(subset, **settings.settings())
        advantages = check_advantages(returned, settings.type, count=len(subset))
        if settings.penalty_only == "drop":
            advantages = drop_penalty_only(subset, advantages)
        return advantages

    if run.ranks.world_size == 1:
        advantages = compute(samples)
    elif settings.traits.tokens:
        advantages = compute(with_all_rows(samples, run.ranks))
    elif settings.traits.by_group:
        advantages = compute_by_group(samples, compute, run.ranks)
    else:
        advantages = compute(list(samples))
    assign(samples, "advantage", advantages)


def compute_log_probs(run: Run, samples: Sequence[Sample]) -> None:
    """Fill action entropies, and the old log-probs of the samples that this rank holds.

    They come from the scoring pass or from the engine. The pass is skipped if `policy.old_logp =
    "engine"` and the engine has already reported what selection needs. Then `optimize` compares the
    sampler's log-probs with the trainer's.
    """
    config = run.config
    from_engine = config.policy.old_logp == "engine"
    sampled_entropy = config.wm.entropy == "sampled" or not config.wm.enabled
    entropy_known = sampled_entropy or bool(column(samples, "has_entropy").all())
    pass_needed = not (from_engine and entropy_known)

    scored: dict[int, tuple[Values, float]] = {}
    if pass_needed:
        scored.update(run.log_probs(run.policy, samples))
    else:
        for i in held(samples, run.ranks):
            scored[i] = (samples[i].sampled_logp, _mean_sampled_entropy(samples[i]))
    is_finite = all(
        np.isfinite(logp).all() and math.isfinite(entropy) for logp, entropy in scored.values()
    )
    if not all(run.ranks.gather(bool(is_finite))):
        raise TrainingStopped(
            f"stopped at update {run.step + 1}: the policy's log-probs are not finite, so its "
            "weights have diverged; resume an earlier checkpoint with a lower optim.lr"
        )
    if pass_needed:
        scored_samples = [samples[i] for i in scored]
        mismatch = sampler_mismatch(
            np.concatenate([no_values(), *(logp for logp, _ in scored.values())]),
            np.concatenate([no_values(), *(sample.sampled_logp for sample in scored_samples)]),
            sampled_by(scored_samples, run.step),
            ranks=run.ranks,
        )
        run.metrics.update(mismatch)

    entropies: list[float] = []
    for i, (logp, entropy) in scored.items():
        sample = samples[i]
        sample.old_logp = sample.sampled_logp if from_engine else logp
        if sampled_entropy:  # the paper's printed form: -q log q of the sampled token
            logps = sample.sampled_logp.tolist()
            entropy = fmean(-math.exp(value) * value for value in logps)
        entropies.append(entropy)
    assign(samples, "entropy", gather_numbers(samples, entropies, run.ranks))


def _mean_sampled_entropy(sample: Sample) -> float:
    """Return the mean of the entropies that the engine reported; 0 if it reported none."""
    if sample.sampled_entropy is None:
        return 0.0
    return fmean(sample.sampled_entropy.tolist())


def compute_reference_log_probs(run: Run, samples: Sequence[Sample]) -> None:
    """Fill the reference model's log-probs of the samples that this rank holds."""
    with run.reference_on_device():
        scored = run.log_probs(run.reference, samples)
    for i, (logp, _) in scored.items():
        samples[i].ref_logp = logp


def select_targets(run: Run, samples: Sequence[Sample], *, reward_max: Sequence[float]) -> None:
    """Fill the world-model weights of the selected samples (PaW Eqs. (8) to (11)).

    Other samples keep 0. `reward_max` is that of each group's environment.
    """
    wm = run.config.wm
    selection = select(
        samples,
        n_groups=len(reward_max),
        alpha=wm.alpha,
        weight=wm.weight,
        distinct=gather_digests(samples, run.ranks) if wm.dedup else None,
        reward_max=reward_max,
    )
    assign(samples, "wm_weight", selection.weights)
    run.metrics["wm/lambda"] = sum(selection.lambdas) / len(selection.lambdas)
    run.metrics["wm/selected_frac"] = sum(selection.selected) / len(samples)


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Return reward and success of the episodes played for an update."""
    success = success_metrics(groups)
    turns = 0
    response_tokens = 0
    mixed = 0
    for group in groups:
        wins = sum(trajectory.won for trajectory in group.trajectories)
        if 0 < wins < len(group.trajectories):
            mixed += 1
        for trajectory in group.trajectories:
            turns += trajectory.summary.turns
            response_tokens += trajectory.summary.response_tokens

    metrics = {
        "reward/mean": success["return"],
        "success/all": success["success"],
        "health/valid_actions": success["valid_actions"],
        "policy/response_tokens": response_tokens / max(1, turns),
        "health/groups_mixed": mixed / max(1, len(groups)),
    }
    for key, value in success.items():
        if key.startswith("success_"):
            metrics[f"success/{key.removeprefix('success_')}"] = value
        elif key.startswith("return_"):
            metrics[f"reward/{key.removeprefix('return_')}"] = value
        elif key.startswith("rewards_"):
            metrics[f"rewards/{key.removeprefix('rewards_')}"] = value
    for label, own_groups in groups_by_environment(groups).items():
        metrics[f"groups/{label}"] = len(own_groups)
    return metrics
