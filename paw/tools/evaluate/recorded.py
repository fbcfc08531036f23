"""Rollouts that need no play: from a file of `paw rollout`, or random ones of a recipe's sizes.

`paw profile` uses both, and `paw sft` only the file.
"""

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
from paw.config.sections import Config
from paw.errors import UserError
from paw.io.files import reading
from paw.run import Run
from paw.tools.plan.plan import OBSERVATION, PROMPT, RESPONSE, WON
from paw.tools.plan.shapes import KEYS, Shape, shape_of
from paw.tools.warmup import quickstart
from paw.types import Group, Ids, Outcome, Task, Trajectory, Turn, as_ids, no_values


def read_episodes(path: Path, *, vocabulary: float = math.inf) -> list[Group]:
    """Read the episodes of a file that `paw rollout` wrote with a model of `vocabulary` tokens.

    Raises UserError for any other file, or if a token id is outside the vocabulary.
    """
    with reading(f"--rollouts {path}"):
        lines = path.read_text(encoding="utf-8").splitlines()
    groups: list[Group] = []
    for number, line in enumerate(lines, 1):
        try:
            _add_turn(groups, json.loads(line), vocabulary=vocabulary)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise UserError(
                f"--rollouts {path}: line {number} is not a turn that `paw rollout` wrote: {error}"
            ) from None
    if not groups:
        raise UserError(f"--rollouts {path}: it contains no turn")
    return groups


def _add_turn(groups: list[Group], record: dict[str, Any], *, vocabulary: float) -> None:
    """Append a line's turn to the last episode of `groups`.

    A turn with step 0 starts an episode, and another group if it has another task.
    """
    task = Task(record.pop("task"), record.pop("kind"))
    member = record.pop("member")
    step = record.pop("step")
    record["outcome"] = Outcome(**record["outcome"])
    turn = Turn(**record)
    largest = max(turn.prompt_ids.max(initial=0), turn.response_ids.max(initial=0))
    if not len(turn.response_ids) or largest >= vocabulary:
        raise ValueError("token ids of another model")

    if step == 0:
        if not groups or groups[-1].task != task:
            groups.append(Group(task, [], index=len(groups)))
        groups[-1].trajectories.append(Trajectory(task, member))
    groups[-1].trajectories[-1].turns.append(turn)


def random_groups(run: Run) -> tuple[Run, list[Group]]:
    """Return (the run, but with an encoding of the random texts; groups of random tokens).

    The groups are as large as in play under the run's limits. Prompts and observations have the
    lengths of searching play in the generated full-size ALFWorld games (450 and 20 tokens of
    Qwen2). The lengths of responses, and the 40 % of episodes that end early, are assumptions.
    """
    config = run.config
    draw = _RandomTurns(config, vocabulary=len(run.policy.head_weight))
    groups = [
        Group(Task(f"random/{index}", "random"), [], index) for index in range(config.rollout.tasks)
    ]
    for group in groups:
        for member in range(config.rollout.group_size):
            group.trajectories.append(Trajectory(group.task, member, draw.episode()))

    chat = copy(run.chat)
    chat.separator_ids = draw.ids(4, limit=4)  # as many as in ChatML
    run = replace(run, chat=chat, encode_observation=lru_cache(65536)(_read_ids))
    return run, as_sampled_by(run, groups)


class _RandomTurns:
    """Draws turns and episodes of random tokens from one generator, seeded by the run."""

    def __init__(self, config: Config, vocabulary: int) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.rng = np.random.default_rng(config.run.seed)

    def ids(self, count: float, limit: int) -> list[int]:
        """Draw about `count` random token ids, at least 1 and at most `limit`."""
        return self.rng.integers(self.vocabulary, size=int(np.clip(count, 1, limit))).tolist()

    def episode(self) -> list[Turn]:
        """Draw the turns of an episode. A won one may end at any turn, others end at the limit."""
        max_turns = self.config.env.max_turns
        won = bool(self.rng.random() < WON)
        last = int(self.rng.integers(max_turns)) if won else max_turns - 1
        return [self.turn(won=won and step == last, done=step == last) for step in range(last + 1)]

    def turn(self, *, won: bool, done: bool) -> Turn:
        # The order of the draws (observation, prompt, response, validity) determines the result for
        # a seed.
        rng = self.rng
        max_prompt = self.config.rollout.max_prompt_tokens
        max_response = self.config.rollout.max_response_tokens
        observation_tokens = OBSERVATION[0] + rng.exponential(OBSERVATION[1])
        observation_ids = self.ids(observation_tokens, limit=self.config.wm.max_tokens)
        observation = " ".join(map(str, observation_ids))
        prompt_ids = self.ids(rng.normal(*PROMPT) * max_prompt, limit=max_prompt)
        response_tokens = rng.lognormal(math.log(RESPONSE[0] * max_response), RESPONSE[1])
        response_ids = self.ids(response_tokens, limit=max_response)
        outcome = Outcome(
            observation,
            reward=self.config.env.reward * won,
            done=done,
            won=won,
            action="",
            valid=bool(rng.random() < 0.95),
        )
        return Turn(
            prompt_ids=as_ids(prompt_ids),
            response_ids=as_ids(response_ids),
            sampled_logp=no_values(),
            entropy=None,
            prompt="",
            response="",
            outcome=outcome,
            anchor=observation,
            version=0,
        )


def _read_ids(text: str) -> Ids:
    """Return the token ids of a random observation. Its text lists their numbers."""
    return as_ids(list(map(int, text.split())))


def random_model(config: Config, folder: Path) -> str:
    """Write a model with random weights and a byte tokenizer to `folder`. Returns the folder.

    The weights have the shape of `model.path`, which is a folder, a name that `shapes` knows, or
    "quickstart". Nothing is downloaded.
    """
    path = config.model.path
    tokenizer = quickstart.build_tokenizer([], set(), [])
    torch.manual_seed(config.run.seed)
    if path == "quickstart":
        lm = quickstart.build_model(tokenizer, config.warmup)
    else:
        lm = AutoModelForCausalLM.from_config(hf_config(shape_of(path)), dtype=torch.bfloat16)
    quickstart.save(lm, tokenizer, folder)
    return str(folder)


def hf_config(shape: Shape) -> Any:
    """Return the Hugging Face configuration of a model of that shape."""
    settings: dict[str, Any] = {key: getattr(shape, name) for name, key in KEYS.items()}
    if shape.experts:
        model_type = "qwen3_moe" if shape.qk_norm else "mixtral"
        settings["num_experts"] = shape.experts
        settings["num_local_experts"] = shape.experts
        settings["num_experts_per_tok"] = shape.active
        settings["moe_intermediate_size"] = shape.intermediate
    elif shape.qk_norm:
        model_type = "qwen3"
    elif shape.qkv_bias:
        model_type = "qwen2"
    else:
        model_type = "llama"
    return AutoConfig.for_model(model_type, **settings)


def as_sampled_by(run: Run, groups: list[Group]) -> list[Group]:
    """Return the groups as if this run's model had sampled them.

    Another model's log-probs would look like those of stale weights.
    """
    rows = to_samples(groups, separator_ids=[], encode_observation=None, invalid_penalty=0.0)
    turns = [
        turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns
    ]
    for turn, (logp, _) in zip(turns, run.log_probs(run.policy, rows).values(), strict=True):
        turn.sampled_logp = logp
    return groups
