"""Algorithm 1 of PaW (arXiv 2606.02388): policy and world-model co-training, as one loop.

    tasks -> environments x engine -> trajectories -> samples -> advantages -> scoring pass ->
          selection and weights -> packed micro-batches -> fused loss -> optimizer -> weights to the
          engine

Deviations from the reference code, on purpose: no random duplication of samples to fill a batch, no
generation for finished episodes, denominators of the whole mini-batch instead of means of
micro-batch means.
"""

import math
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from torch.nn.utils import clip_grad_norm_

from paw import hooks, plugins
from paw.algo import loss as losses
from paw.algo.advantages import checked, drop_penalty_only
from paw.algo.loss import TokenLossFunction
from paw.algo.samples import micro_batches, to_samples
from paw.algo.world_model import select
from paw.build import WITHOUT_TOOLS, Preparation
from paw.config import Config
from paw.model.optim import learning_rate, set_learning_rate
from paw.model.ranks import full_tensor
from paw.rollouts.episode import bind
from paw.rollouts.scheduler import Rollouts, RolloutStats
from paw.rollouts.success import success_metrics
from paw.rollouts.sync import StaleWeightsError, push_weights, sampled_by, sampler_mismatch
from paw.run import Run, open_run
from paw.state.guards import TrainingStopped, alarms, what_is_saved
from paw.types import Group, Sample
from paw_kernels import TokenLoss

PAUSES_S = (5, 10, 20, 40, 60)
"""Seconds before an update whose episodes failed is played again; more than two minutes in all."""


def train(
    config: Config,
    *,
    resume: str = "",
    numbered: bool = False,
    preparation: Preparation = WITHOUT_TOOLS,
) -> Path:
    """Train to config.run.updates and write the run directory; returns the path of the report.

    `resume` continues a run: "auto" from the newest checkpoint that verifies, or from one by its
    name, "step_000100". `numbered` takes run.name as a stem: a new run is NAME-2 where there is a
    NAME, and so on, and `resume` means the one of the highest number. Raises UserError for a
    mistake of the user; checkpoints stay. `preparation` comes from the tools (`paw.tools.train`).
    """
    with open_run(config, resume=resume, numbered=numbered, preparation=preparation) as run:
        with closing(run.make_rollouts()) as rollouts:
            push_weights(run.policy.lm, run.engine, version=run.step)
            run.catch_up(rollouts)
            while run.step < config.run.updates and not run.stop_requested():
                update(run, rollouts)
        return run.finish()


def update(run: Run, rollouts: Rollouts) -> None:
    """One update: play, prepare samples, optimize, send the weights to the engine, log what happened."""
    log = run.metrics
    groups, sampled = rollout(run, rollouts)
    if not groups:  # told to stop
        return
    run.engine.sleep()  # until the next weights: training needs the memory
    log.update(rollout_metrics(groups + sampled.uniform) | sampled.metrics())
    try:
        with run.clock("score"), hooks.users_advantages(run.config):
            samples = prepare(run, groups)
    except StaleWeightsError as error:
        run.play_again(error)
        return update(run, rollouts)
    with run.clock("update"), hooks.users_losses(run.config):
        log.update(optimize(run, samples))
    run.step += 1
    with run.clock("sync"):
        push_weights(run.policy.lm, run.engine, version=run.step)
    run.end_update(rollouts, tokens=sampled.prompt_tokens + sampled.response_tokens)
    if run.log:
        for warning in alarms(run.log.history, run.config, reward_max=run.factory.reward_max):
            run.say(warning)


def rollout(run: Run, rollouts: Rollouts) -> tuple[list[Group], RolloutStats]:
    """The update's episodes. While too many fail, as when a server that they need restarts, the run
    is saved and they are played again after PAUSES_S; no groups where it is told to stop meanwhile.

    Raises TrainingStopped when they fail after the last pause too.
    """
    tries: list[RolloutStats] = []
    for pause in (*PAUSES_S, 0):
        with run.clock("rollout"):
            groups, stats = rollouts.training(
                run.step, run.config.rollout.tasks, run.counting("episodes")
            )
        tries.append(stats)
        for failure in stats.failures[:3]:
            run.say(f"environment failed: {failure}")
        if groups:
            break
        if run.saved != run.step:
            run.save()
        if not pause:
            why = (*stats.failures, "they have no turns")[0]
            reason = f"no group has two episodes left in {len(tries)} tries ({why})"
            raise TrainingStopped(
                f"stopped at update {run.step + 1}: {reason}; {what_is_saved(run.saved)}"
            )
        run.say(
            f"update {run.step + 1}: no group has two episodes left; playing them again in {pause} s"
        )
        for _ in range(pause):
            if run.stop_requested():
                return [], stats
            time.sleep(1)
        if any(
            run.ranks.gather(bool(run.engine.faults))
        ):  # a server that is back needs the weights
            push_weights(run.policy.lm, run.engine, version=run.step)
    return groups, RolloutStats.sum(tries)


def prepare(run: Run, groups: list[Group]) -> list[Sample]:
    """The update's samples with their advantages, old log-probs and, with a world model, weights of their targets."""
    config = run.config
    samples = to_samples(
        groups,
        separator_ids=run.chat.separator_ids,
        encode_observation=run.encode_observation if config.wm.enabled else None,
        invalid_penalty=run.factory.invalid_penalty,
    )
    if config.rollout.ahead:
        ages = [run.step - version for sample in samples for version in sample.versions]
        run.metrics |= {"staleness/mean": fmean(ages), "staleness/max": max(ages)}
    compute_advantages(run, samples)
    compute_log_probs(run, samples)
    if config.wm.enabled:
        select_targets(run, samples, n_groups=len(groups))
    return samples


def compute_advantages(run: Run, samples: list[Sample]) -> None:
    """Advantages relative to the group, or from the critic's values (PPO)."""
    if run.critic:
        run.metrics.update(run.critic.compute_values(samples))
        return
    settings = run.config.advantage
    found = checked(
        plugins.load("advantages", settings.type)(samples, **settings.settings()),
        samples,
        settings.type,
    )
    found = drop_penalty_only(samples, found) if settings.penalty_only == "drop" else found
    for sample, advantage in zip(samples, found, strict=True):
        sample.advantage = advantage


def select_targets(run: Run, samples: list[Sample], *, n_groups: int) -> None:
    """World-model weights of the selected samples (PaW Eqs. (8) to (11)); the others keep 0."""
    wm = run.config.wm
    options = {
        "alpha": wm.alpha,
        "weight": wm.weight,
        "dedup": wm.dedup,
        "reward_max": run.factory.reward_max,
    }
    selection = select(samples, n_groups=n_groups, **options)
    for sample, weight in zip(samples, selection.weights, strict=True):
        sample.wm_weight = weight
    run.metrics["wm/lambda"] = sum(selection.lambdas) / len(selection.lambdas)
    run.metrics["wm/selected_frac"] = sum(selection.selected) / len(samples)


def compute_log_probs(run: Run, samples: list[Sample]) -> None:
    """Fill old log-probs and action entropies from the scoring pass, or from the engine where that is asked for.

    The pass is skipped when `policy.old_logp = "engine"` and the engine already gave what selection
    needs; `optimize` compares the sampler's log-probs with the trainer's then.
    """
    config = run.config
    from_engine = config.policy.old_logp == "engine"
    sampled_entropy = config.wm.entropy == "sampled" or not config.wm.enabled
    entropy_known = sampled_entropy or all(sample.sampled_entropy is not None for sample in samples)
    pass_needed = not (from_engine and entropy_known)
    if pass_needed:
        scored = run.log_probs(run.policy, samples)
    else:
        scored = [
            (sample.sampled_logp, fmean(sample.sampled_entropy or [0.0])) for sample in samples
        ]
    if not all(math.isfinite(value) for logp, entropy in scored for value in (*logp, entropy)):
        raise TrainingStopped(
            f"stopped at update {run.step + 1}: the policy's log-probs are not finite, its weights have diverged; "
            "resume an earlier checkpoint with a lower optim.lr"
        )
    if pass_needed:
        sampled, servers = (
            [sample.sampled_logp for sample in samples],
            sampled_by(samples, run.step),
        )
        run.metrics.update(sampler_mismatch([logp for logp, _ in scored], sampled, servers))
    for sample, (logp, entropy) in zip(samples, scored, strict=True):
        sample.old_logp = sample.sampled_logp if from_engine else logp
        if sampled_entropy:  # the paper's printed form: -q log q of the sampled token
            entropy = fmean(-math.exp(value) * value for value in sample.sampled_logp)
        sample.entropy = entropy
    if config.policy.kl_coef > 0.0:
        with run.reference_at_hand():
            reference = run.log_probs(run.reference, samples)
        for sample, (logp, _) in zip(samples, reference, strict=True):
            sample.ref_logp = logp


def token_losses(config: Config) -> tuple[TokenLossFunction, TokenLossFunction]:
    """The losses of response and of observation tokens, with their settings."""
    engine_ratio = config.policy.old_logp == "engine" and config.policy.tis_cap is not None
    policy = (
        losses.tis
        if engine_ratio and config.policy.loss == "ppo"
        else plugins.load("losses", config.policy.loss)
    )
    return bind(policy, config.policy), bind(plugins.load("losses", config.wm.loss), config.wm)


def optimize(run: Run, samples: list[Sample]) -> dict[str, float]:
    """Optimizer steps over the update's samples: mini-batches, each cut into micro-batches, each one fused pass.

    PPO's critic goes first, over the same mini-batches. Raises StaleWeightsError where no log-prob
    pass was made and the first micro-batch finds that the sampler had other weights.
    """
    config, ranks, policy = run.config, run.ranks, run.policy
    options = config.policy
    acting, watching = token_losses(config)
    weighing: Any = {
        "tis_cap": options.tis_cap if options.old_logp == "trainer" else None,
        "is_mask": options.is_mask,
    }
    loss = losses.joint(
        acting, watching, kl_coef=options.kl_coef, entropy_coef=options.entropy_coef, **weighing
    )
    tally = partial(losses.tally, policy=acting, wm=watching, **weighing)
    lr = learning_rate(config.optim, update=run.step, updates=config.run.updates)
    set_learning_rate(run.optimizer, lr)
    found = run.critic.optimize(run.minibatches(samples)) if run.critic else {}
    unscored = "health/sampler_mismatch" not in run.metrics
    of_update: Any = {
        "update_samples": len(samples), "norm": options.loss_norm, "verl_samples": options.verl_samples,
        "wm_scale": config.wm.scale, "reference": options.kl_coef > 0.0, "is_level": options.is_level,
    }  # fmt: skip
    sums, norms, steps = [0.0] * len(losses.SUMS), list[float](), 0
    for minibatch in run.minibatches(samples):
        batches = micro_batches(
            minibatch,
            budget=config.optim.micro_batch_tokens,
            with_observation=config.wm.enabled,
            device=policy.device,
            quadratic=policy.quadratic,
            skip=partial(zero_gradient, config),
            share=(ranks.rank, ranks.world_size),
        )
        total = 0.0
        for batch in batches:
            ranks.sync_gradients(policy, config.optim.grad_sync == "each" or batch is batches[-1])
            tokens = losses.token_batch(batch, minibatch, **of_update)
            scaled = replace(
                tokens, weight=ranks.world_size * tokens.weight
            )  # gradients are averaged over ranks
            out = losses.joint_loss(
                policy, batch, scaled, loss, temperature=config.rollout.temperature
            )
            out.loss.backward()
            if unscored:
                of_batch = [minibatch[i] for i in batch.indices]
                unscored, found = False, found | compare_sampler(run, out, tokens, of_batch)
            total += float(out.loss.detach()) / ranks.world_size
            out = out._replace(token_loss=out.token_loss / ranks.world_size)
            sums = [a + b for a, b in zip(sums, tally(out, tokens), strict=True)]
        steps += 1
        ranks.average_gradients(policy)
        norm = float(full_tensor(clip_grad_norm_(policy.parameters(), config.optim.grad_clip)))
        if run.guard.allows(loss=sum(ranks.gather(total)), grad_norm=norm):
            run.optimizer.step()
            norms.append(norm)
        run.optimizer.zero_grad(set_to_none=True)
    sums = [sum(parts) for parts in zip(*ranks.gather(sums, list[float]), strict=True)]
    masks: Any = {"masks": config.wm.loss == "cmae"} | {
        key: value is not None for key, value in weighing.items()
    }
    return {
        **losses.metrics(sums, steps=steps, reference=options.kl_coef > 0.0, **masks),
        **found,
        "optim/lr": lr,
        **({"optim/grad_norm": fmean(norms)} if norms else {}),
        "optim/skipped": run.guard.skipped,
    }


def zero_gradient(config: Config, sample: Sample) -> bool:
    """Whether a sample can have no gradient at all, so that its forward pass is not worth making."""
    options = config.policy
    others = (
        options.kl_coef > 0.0
        or options.entropy_coef > 0.0
        or options.loss not in ("ppo", "cispo", "gspo")
    )
    return not (others or any(sample.advantages) or sample.wm_weight)


def compare_sampler(
    run: Run, out: TokenLoss, tokens: losses.TokenBatch, samples: list[Sample]
) -> dict[str, float]:
    """A micro-batch's log-probs of responses, of all ranks, with what the sampler gave for them;
    before any step. Of this rank's, the entropies too, where the sampler gives any."""
    action, servers = (
        ~tokens.observation,
        [server for part in sampled_by(samples, run.step) for server in part],
    )
    entropy = [value for sample in samples for value in sample.sampled_entropy or []]
    rows = [out.logp[action].tolist(), tokens.sampled_logp[action].tolist()]
    (ours, theirs), of = (
        zip(*run.ranks.gather_rows(rows, float), strict=True),
        run.ranks.gather(servers),
    )
    if all(math.isfinite(value) for part in ours for value in part):  # else the update is skipped
        if len(entropy) == len(servers):
            sampler_mismatch([out.entropy[action].tolist()], [entropy], [servers], what="entropies")
        return sampler_mismatch(ours, theirs, of)
    return {}


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Reward and success of the episodes that were played for an update."""
    played = success_metrics(groups)
    mixed = sum(
        0 < sum(t.won for t in group.trajectories) < len(group.trajectories) for group in groups
    )
    lengths = [
        len(turn.response_ids) for group in groups for t in group.trajectories for turn in t.turns
    ]
    by_kind = {
        key.replace("_", "/", 1): share
        for key, share in played.items()
        if key.startswith("success_")
    }
    return {
        "reward/mean": played["return"],
        "success/all": played["success"],
        "health/valid_actions": played["valid_actions"],
        "policy/response_tokens": sum(lengths) / max(1, len(lengths)),
        "health/groups_mixed": mixed / max(1, len(groups)),
        **by_kind,
    }
