"""What computing shared prefixes only once saves in the scoring and update passes of a group's rows.

    python bench/trainer/shared_prefix.py --layers 2      writes bench/results/shared_prefix_cpu.csv
    python bench/trainer/shared_prefix.py --short         alfworld and conversation in all 30 layers

The rows of a group of eight go through the trainer's own micro-batches, body, head and loss, in
SmolLM2-135M's shape with random weights:

    alfworld       the paper's prompts (Figure 8), a row per turn
    search         the paper's search prompts (Figure 9), a row per turn; a share `same` of the members
                   make the same queries, the others make their own
    conversation   a row per episode, after a system prompt of 1,200 tokens, about the size of
                   tau2-bench's airline policy

With `--short`, alfworld is only the third turn of each member, which shares about as much as the
first four together, and all texts of a conversation are half as long.

Texts are random words of docs/. If the gradients with and without sharing differ, this ends with an
error. Each round is a pair, with and without sharing, and rounds alternate the order. Ratios of
processor time also hold on a busy machine; those of wall time do not.
"""

import argparse
import random
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, cpu_name, write
from bench.trainer.conversations import make_chat
from paw.algo import loss as losses
from paw.algo.batches import micro_batches
from paw.algo.packing import Packing
from paw.config.recipe import load
from paw.config.sections import OptimConfig
from paw.envs import make_factory
from paw.envs.base import train_tasks
from paw.envs.search.prompt import Action, PaperStyle
from paw.model.policy import Policy
from paw.rundir.record import code_commit
from paw.tools.evaluate.recorded import hf_config
from paw.tools.plan.shapes import SHAPES
from paw.types import Sample

BUDGET = 8192
"""Tokens of a micro-batch."""
MEMBERS = 8
CASES = (
    ("alfworld", None),
    ("conversation", None),
    ("search", 0.0),
    ("search", 0.5),
    ("search", 1.0),
)
"""(rows, same)"""
FILE = "shared_prefix_cpu.csv"
SHORT_FILE = "shared_prefix_depth_cpu.csv"
SHORT_CASES = (("alfworld", None), ("conversation", None))
SYSTEM_TOKENS = 1200
TURNS = 4
"""Turns of a member, in ALFWorld or in a conversation."""
WORDS = 60
"""Words of a message in a conversation."""


def random_text(words: list[str], count: int, rng: random.Random) -> str:
    first_word = rng.randrange(len(words) - count)
    return " ".join(words[first_word : first_word + count])


def sample(
    prompt_ids: list[int], response_ids: list[int], *, trajectory: int, rng: random.Random
) -> Sample:
    """A turn of the group, with a random advantage and made-up log-probs."""
    response_length = len(response_ids)
    return Sample(
        group=0,
        trajectory=trajectory,
        step=0,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        sampled_logp=[-10.0] * response_length,
        old_logp=[-10.0] * response_length,
        advantage=rng.choice([-1.0, 1.0]),
    )


def alfworld_rows(chat: Any, rng: random.Random, *, turns: Collection[int]) -> list[Sample]:
    """A group plays an embedded game. About half of its actions are the oracle's, half random."""
    overrides = {"model.path": "-", "env.data": "none"}
    factory = make_factory(load("alfworld-grpo-paw", overrides))
    (task,) = train_tasks(factory, 0, 1, 0)
    words = docs_words()
    samples: list[Sample] = []
    for member in range(MEMBERS):
        environment = factory.make()
        environment.reset(task)
        for turn in range(1 + max(turns)):
            prompt_ids = chat.prompt_ids(environment.context())
            action = environment.oracle().partition("<action>")[2].partition("</action>")[0]
            if rng.random() < 0.5:
                action = rng.choice(environment.admissible_actions())
            response = f"<think>{random_text(words, 40, rng)}</think><action>{action}</action>"
            if turn in turns:
                response_ids = chat.response_ids(response)
                samples.append(sample(prompt_ids, response_ids, trajectory=member, rng=rng))
            if environment.step(response).done:
                break
    return samples


def search_rows(chat: Any, same_share: float, rng: random.Random) -> list[Sample]:
    """A group uses a search engine on one question. Results depend on all the queries so far."""
    words = docs_words()
    prompts = PaperStyle()
    question = f"{random_text(words, 12, rng)}?"
    common_queries: dict[tuple[str, ...], str] = {}
    observations: dict[tuple[str, ...], str] = {}
    samples: list[Sample] = []
    for member in range(MEMBERS):
        past_turns: list[tuple[Action, str]] = []
        queries: tuple[str, ...] = ()
        for _ in range(rng.choice([2, 3, 4])):
            query = random_text(words, 6, rng)
            if member < same_share * MEMBERS:
                query = common_queries.setdefault(queries, query)
            queries += (query,)
            results = [random_text(words, 100, rng) for _ in range(3)]
            observation = observations.setdefault(queries, prompts.observation(results))
            thought = random_text(words, 40, rng)
            response_ids = chat.response_ids(f"<think>{thought}</think><search>{query}</search>")
            prompt_ids = chat.prompt_ids(prompts.prompt(question, past_turns))
            samples.append(sample(prompt_ids, response_ids, trajectory=member, rng=rng))
            past_turns.append((Action("search", query), observation))
    return samples


def conversation_rows(chat: Any, rng: random.Random, *, divisor: int) -> list[Sample]:
    """A group has conversations after the same system prompt and the same customer request."""
    words = docs_words()
    vocabulary = [token_id for word in words[:2000] for token_id in chat.response_ids(word)]
    system_ids = [rng.choice(vocabulary) for _ in range(SYSTEM_TOKENS // divisor)]
    request_ids = chat.response_ids(random_text(words, WORDS // divisor, rng))
    samples: list[Sample] = []
    for member in range(MEMBERS):
        response_ids: list[int] = []
        for _ in range(TURNS):
            response_ids += chat.response_ids(random_text(words, WORDS // divisor, rng))
        samples.append(sample(system_ids + request_ids, response_ids, trajectory=member, rng=rng))
    return samples


@cache
def docs_words() -> list[str]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    return "".join(page.read_text(encoding="utf-8") for page in pages).split()


def run(policy: Policy, samples: list[Sample], *, shared: bool) -> dict[str, float]:
    """Scores and updates on all rows: processor and wall seconds, tokens, gradient norm."""
    policy.zero_grad()
    packing = Packing.of(OptimConfig(micro_batch_tokens=BUDGET), policy)
    packing = replace(packing, share_prefixes="auto" if shared else "never")
    objective = losses.joint(losses.ppo, losses.cmae, kl_coef=0.0, entropy_coef=0.001)

    cpu_start = time.process_time()
    started = time.perf_counter()
    scored = losses.log_probs(policy, samples, packing, temperature=1.0)
    for index, (logp, _) in scored.items():
        samples[index].old_logp = [token_logp - 0.01 for token_logp in logp]
    batches = micro_batches(samples, packing, with_observation=True, device=policy.device)
    for batch in batches:
        tokens = losses.token_batch(batch, samples, update_samples=len(samples))
        losses.joint_loss(policy, batch, tokens, objective, temperature=1.0).loss.backward()
    cpu_s = time.process_time() - cpu_start
    seconds = time.perf_counter() - started

    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    return {
        "cpu_s": cpu_s,
        "seconds": seconds,
        "tokens": sum(len(batch.input_ids) for batch in batches),
        "grad_norm": float(torch.nn.utils.get_total_norm(gradients)),
    }


def compare(policy: Policy, samples: list[Sample], *, rounds: int) -> dict[str, float]:
    """How many times fewer tokens sharing takes, and how many times as fast it is (medians)."""
    ratios: list[float] = []
    cpu_ratios: list[float] = []
    fewer_tokens = 0.0
    for number in range(rounds):
        pair_order = (True, False) if number % 2 == 0 else (False, True)
        measured = {shared: run(policy, samples, shared=shared) for shared in pair_order}
        apart = measured[False]
        together = measured[True]
        assert abs(together["grad_norm"] / apart["grad_norm"] - 1) < 1e-3, measured
        ratios.append(apart["seconds"] / together["seconds"])
        cpu_ratios.append(apart["cpu_s"] / together["cpu_s"])
        fewer_tokens = apart["tokens"] / together["tokens"]
    return {
        "tokens": int(apart["tokens"]),
        "fewer_tokens": round(fewer_tokens, 3),
        "rounds": rounds,
        "faster": round(median(ratios), 3),
        "faster_worst": round(min(ratios), 3),
        "less_cpu": round(median(cpu_ratios), 3),
        "less_cpu_worst": round(min(cpu_ratios), 3),
        "cpu_s_shared": round(together["cpu_s"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    chat = make_chat()
    settings = hf_config(SHAPES["SmolLM2-135M"])
    settings.num_hidden_layers = options.layers
    policy = Policy(AutoModelForCausalLM.from_config(settings))
    records: list[dict[str, Any]] = []
    for rows_name, same_share in SHORT_CASES if options.short else CASES:
        record: dict[str, Any] = {"rows": rows_name, "same": same_share, "members": MEMBERS}
        samples = make_rows(rows_name, chat, same_share=same_share or 0.0, short=options.short)
        record |= compare(policy, samples, rounds=options.rounds)
        record |= {
            "layers": options.layers,
            "device": cpu_name(),
            "threads": options.threads,
            "torch": torch.__version__,
            "commit": code_commit(),
        }
        print(record, flush=True)
        records.append(record)
        write(RESULTS / (SHORT_FILE if options.short else FILE), records)


def make_rows(rows_name: str, chat: Any, *, same_share: float, short: bool) -> list[Sample]:
    rng = random.Random(0)
    if rows_name == "alfworld":
        return alfworld_rows(chat, rng, turns=(2,) if short else range(TURNS))
    if rows_name == "search":
        return search_rows(chat, same_share, rng)
    return conversation_rows(chat, rng, divisor=2 if short else 1)


if __name__ == "__main__":
    main()
