"""A few evaluation episodes as the report shows them: what was seen and done, and what the model thought would come."""

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from paw.errors import UserError
from paw.model.policy import Policy
from paw.rollout.chat import Chat
from paw.rollout.engines.base import Engine, Request
from paw.types import Group
from paw_kernels import token_stats

if TYPE_CHECKING:
    from paw.run import Run

MAX_EPISODES, MAX_TURNS = 3, 20
"""Of an evaluation, and of an episode: these are for reading, the rest for metrics."""


class Samples:
    """A callback that writes a few episodes of each evaluation to samples.jsonl; all ranks compute them."""

    def on_evaluation(self, run: "Run", groups: list[Group], metrics: dict[str, Any]) -> None:
        limits = {"count": MAX_EPISODES, "max_tokens": run.config.wm.max_tokens}
        for sample in sample_episodes(groups, run.policy, run.engine, run.chat, **limits):
            if run.log:
                run.log.sample(run.step, sample)


def sample_episodes(
    groups: list[Group], policy: Policy, engine: Engine, chat: Chat, *, count: int, max_tokens: int
) -> Iterator[dict[str, Any]]:
    """JSON-able records of the first `count` games, for each turn with the greedy prediction of the next observation
    and the probability of each of its real tokens (teacher-forced)."""
    for group in groups[:count]:
        episode = group.trajectories[0]
        turns = episode.turns[:MAX_TURNS]
        contexts = [turn.prompt_ids + turn.response_ids + chat.separator_ids for turn in turns]
        targets = [chat.observation_ids(turn.outcome.observation, max_tokens) for turn in turns]
        predicted = _predictions(contexts, targets, engine)
        yield {
            "task": episode.task.id,
            "kind": episode.task.kind,
            "won": episode.won,
            "return": episode.episode_return,
            "length": len(episode.turns),
            "turns": [
                {
                    "prompt": turn.prompt,
                    "response": turn.response,
                    "action": turn.outcome.action,
                    "valid": turn.outcome.valid,
                    "observation": turn.outcome.observation,
                    "predicted": chat.decode(predicted[i]) if i in predicted else None,
                    "entropy": sum(turn.entropy) / len(turn.entropy) if turn.entropy else None,
                    "observation_token_p": _probabilities(policy, contexts[i], targets[i]),
                    "observation_tokens": [chat.decode([token]) for token in targets[i]],
                }
                for i, turn in enumerate(turns)
            ],
        }


def _predictions(contexts: list[list[int]], targets: list[list[int]], engine: Engine) -> dict[int, list[int]]:
    """The most likely continuation of each context, by its place in the list; none where it would be too long."""
    for i, (context, target) in enumerate(zip(contexts, targets, strict=True)):
        if target:
            with suppress(UserError):  # beyond the engine's length, which is made for prompt and response
                engine.submit(Request(-1 - i, context, seed=0, temperature=0.0, max_tokens=len(target)))
    predicted: dict[int, list[int]] = {}
    while engine.pending:
        predicted |= {-1 - completion.key: completion.token_ids for completion in engine.step()}
    return predicted


@torch.no_grad()
def _probabilities(policy: Policy, context: list[int], target: list[int]) -> list[float]:
    ids = torch.tensor(context + target, device=policy.device)

    def target_logp() -> torch.Tensor:
        hidden = policy.hidden(ids, [len(ids)])[len(context) - 1 : len(ids) - 1]
        labels = ids[len(context) :]
        return token_stats(hidden, policy.head_weight, labels, **policy.head_options(1.0)).logp

    return [round(p, 4) for p in policy(target_logp).exp().tolist()]
