"""Rollouts that `paw profile` does not play: read from a file of `paw rollout`, or random ones of a recipe's sizes."""

import json
import math
from copy import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paw.algo.samples import to_samples
from paw.config import Config
from paw.errors import UserError
from paw.files import reading
from paw.run import Run
from paw.tools import quickstart
from paw.tools.plan import OBSERVATION, PROMPT, RESPONSE, WON
from paw.tools.shapes import KEYS, Shape, shape_of
from paw.types import Group, Outcome, Task, Trajectory, Turn


def read_episodes(path: Path, *, vocabulary: float = math.inf) -> list[Group]:
    """The episodes of a file that `paw rollout` wrote, with a model of so many tokens; UserError for any other."""
    with reading(f"--rollouts {path}"):
        lines = path.read_text(encoding="utf-8").splitlines()
    groups: list[Group] = []
    for number, line in enumerate(lines, 1):
        try:
            told = json.loads(line)
            task, member, step = Task(told.pop("task"), told.pop("kind")), told.pop("member"), told.pop("step")
            turn = Turn(**{**told, "outcome": Outcome(**told["outcome"])})
            if not turn.response_ids or max(turn.prompt_ids + turn.response_ids) >= vocabulary:
                raise ValueError("token ids of another model")
            if step == 0:
                if not groups or groups[-1].task != task:
                    groups.append(Group(task, [], place=len(groups)))
                groups[-1].trajectories.append(Trajectory(task, member))
            groups[-1].trajectories[-1].turns.append(turn)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise UserError(f"--rollouts {path}: line {number} is no turn that `paw rollout` wrote: {error}") from None
    if not groups:
        raise UserError(f"--rollouts {path}: there is no turn in it")
    return groups


def random_groups(run: Run) -> tuple[Run, list[Group]]:
    """Random tokens in the sizes of ALFWorld play under the recipe's limits, and the run with their encoding.

    Prompts and observations have the lengths of searching play of the generated full-size games (450 and 20 tokens of
    Qwen2). Responses, and 40 % of episodes that end early, are assumptions.
    """
    config, vocabulary = run.config, len(run.policy.head_weight)
    rng = np.random.default_rng(config.run.seed)
    longest, most = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens

    def ids(count: float, limit: int) -> list[int]:
        return rng.integers(vocabulary, size=int(np.clip(count, 1, limit))).tolist()

    def turn(*, won: bool, done: bool) -> Turn:
        observation = " ".join(map(str, ids(OBSERVATION[0] + rng.exponential(OBSERVATION[1]), config.wm.max_tokens)))
        return Turn(
            prompt_ids=ids(rng.normal(*PROMPT) * longest, longest),
            response_ids=ids(rng.lognormal(math.log(RESPONSE[0] * most), RESPONSE[1]), most),
            sampled_logp=[],
            entropy=None,
            prompt="",
            response="",
            outcome=Outcome(observation, config.env.reward * won, done, won, "", valid=bool(rng.random() < 0.95)),
            anchor=observation,
            version=0,
        )

    groups = [Group(Task(f"random/{place}", "random"), [], place) for place in range(config.rollout.tasks)]
    for group in groups:
        for member in range(config.rollout.group_size):
            won = bool(rng.random() < WON)
            last = int(rng.integers(config.env.max_turns)) if won else config.env.max_turns - 1
            turns = [turn(won=won and step == last, done=step == last) for step in range(last + 1)]
            group.trajectories.append(Trajectory(group.task, member, turns))
    chat = copy(run.chat)
    chat.separator_ids = ids(4, 4)  # as many as ChatML's
    run = replace(run, chat=chat, encode_observation=lru_cache(65536)(lambda text: list(map(int, text.split()))))
    return run, with_log_probs(run, groups)


def random_model(config: Config, folder: Path) -> str:
    """A folder with random weights of the shape of `model.path` (folder, name that `shapes` knows, or "quickstart") and
    a tokenizer of bytes; nothing is downloaded."""
    path, tokenizer = config.model.path, quickstart.build_tokenizer([], set(), [])
    torch.manual_seed(config.run.seed)
    if path == "quickstart":
        lm = quickstart.build_model(tokenizer, config.warmup)
    else:
        lm = AutoModelForCausalLM.from_config(hf_config(shape_of(path)), dtype=torch.bfloat16)
    quickstart.save(lm, tokenizer, folder)
    return str(folder)


def hf_config(shape: Shape) -> Any:
    """The Hugging Face configuration of a model of that shape."""
    if shape.experts:
        kind: dict[str, Any] = {"model_type": "qwen3_moe" if shape.qk_norm else "mixtral"}
        kind |= {"num_experts": shape.experts, "num_local_experts": shape.experts}
        kind |= {"num_experts_per_tok": shape.active, "moe_intermediate_size": shape.intermediate}
    else:
        kind = {"model_type": "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"}
    return AutoConfig.for_model(**kind, **{key: getattr(shape, name) for name, key in KEYS.items()})


def with_log_probs(run: Run, groups: list[Group]) -> list[Group]:
    """The groups as if this run's model had sampled them: another one's log-probs would pass for stale weights."""
    rows = to_samples(groups, separator_ids=[], encode_observation=None, invalid_penalty=0.0)
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    for turn, (logp, _) in zip(turns, run.log_probs(run.policy, rows), strict=True):
        turn.sampled_logp = logp
    return groups
