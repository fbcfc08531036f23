"""A few evaluation episodes as the report shows them: what was seen and done, and what the model thought would come."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from paw.errors import UserError
from paw.experience.chat import Chat
from paw.experience.engines.base import Engine, Request
from paw.learner.model import Policy
from paw.types import Group, Turn
from paw_kernels import token_stats

MAX_TURNS = 20
"""Turns of an episode that get a prediction; long episodes are for metrics, not for reading."""


def sample_episodes(
    groups: list[Group], policy: Policy, engine: Engine, chat: Chat, *, count: int, max_tokens: int
) -> Iterator[dict[str, Any]]:
    """JSON-able records of the first `count` games, for each turn with the greedy prediction of the next observation
    and the probability of each of its real tokens (teacher-forced)."""
    for group in groups[:count]:
        episode = group.trajectories[0]
        turns = episode.turns[:MAX_TURNS]
        targets = [chat.observation_ids(turn.outcome.observation, max_tokens) for turn in turns]
        predicted = _predictions(turns, targets, engine, chat)
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
                    "predicted": guess,
                    "entropy": sum(turn.entropy) / len(turn.entropy) if turn.entropy else None,
                    "observation_token_p": probability,
                    "observation_tokens": [chat.decode([i]) for i in target],
                }
                for turn, target, guess, probability in zip(
                    turns, targets, predicted, _probabilities(turns, targets, policy, chat), strict=True
                )
            ],
        }


def _context(turn: Turn, chat: Chat) -> list[int]:
    return turn.prompt_ids + turn.response_ids + chat.separator_ids


def _predictions(turns: list[Turn], targets: list[list[int]], engine: Engine, chat: Chat) -> list[str | None]:
    for i, (turn, target) in enumerate(zip(turns, targets, strict=True)):
        if target:
            request = Request(-1 - i, _context(turn, chat), seed=0, temperature=0.0, max_tokens=len(target))
            with suppress(UserError):  # beyond the engine's length, which is made for prompt and response
                engine.submit(request)
    predicted: list[str | None] = [None] * len(turns)
    while engine.pending:
        for completion in engine.step():
            predicted[-1 - completion.key] = chat.decode(completion.token_ids)
    return predicted


@torch.no_grad()
def _probabilities(turns: list[Turn], targets: list[list[int]], policy: Policy, chat: Chat) -> Iterator[list[float]]:
    for turn, target in zip(turns, targets, strict=True):
        context = _context(turn, chat)
        ids = torch.tensor([context + target], device=policy.device)
        yield [round(p, 4) for p in policy(partial(_target_logp, policy, ids, len(target))).exp().tolist()]


def _target_logp(policy: Policy, ids: torch.Tensor, n: int) -> torch.Tensor:
    """Log-probs of the last n tokens of ids [1, L]."""
    end = ids.shape[1]
    hidden, labels = policy.hidden(ids)[0, end - n - 1 : end - 1], ids[0, end - n :]
    return token_stats(hidden, policy.head_weight, labels, bias=policy.head_bias, backend=policy.head_backend).logp
