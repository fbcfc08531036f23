"""What running the tokens that prompts share once would save: packed rows against a trie of them, the body alone.

    python bench/trainer/shared_prefix.py       renews bench/results/shared_prefix_cpu.csv

The paper's search prompts (Figure 9, whole history, up to 4 turns, 3 passages of 100 words), random
words of docs/ in SmolLM2's vocabulary, `--layers` layers of SmolLM2-135M's shape. Members of a
group think different thoughts and ask for the same as the others with a probability, `same`; the
same query finds the same passages. The trie holds each shared prefix once, at its own positions; a
row's own tokens attend to their path. Both give the same function of the hidden states and the same
gradient, or this ends with an error.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, cpu_name, write
from bench.trainer.conversations import make_chat
from paw.algo.packing import batches_of_similar_length
from paw.envs.search.prompt import Action, ChatStyle, PaperStyle
from paw.model.attention import ATTENTION
from paw.model.policy import Policy
from paw.rundir.record import code_commit
from paw.tools.evaluate.recorded import hf_config
from paw.tools.plan.shapes import SHAPES

BUDGET = 8192
"""Tokens of a micro-batch."""
GROUPS = 5
"""Tokens are counted over so many groups."""
CASES = [
    ("paper", 5, 0.0),
    ("paper", 5, 0.5),
    ("paper", 5, 1.0),
    ("paper", 8, 0.0),
    ("paper", 8, 0.5),
    ("paper", 8, 1.0),
    ("chat", 8, 0.0),
]
"""(style, members, same); the first group of those with five members is timed."""
Row = tuple[list[int], list[int]]
"""Prompt and response."""


@dataclass(frozen=True)
class Tree:
    """A trie of rows, flat: row i adds the tokens [start, end) and attends to `path`, its whole
    row."""

    input_ids: list[int]
    positions: list[int]
    rows: list[tuple[int, int, Tensor]]
    """(start, end, path [length of the row] int64) in the order of the rows."""


def tree(rows: Sequence[list[int]]) -> Tree:
    """The trie of rows. In sorted order, each row shares most with the one before it."""
    ids: list[int] = []
    positions: list[int] = []
    spans: dict[int, tuple[int, int, Tensor]] = {}
    path: list[int] = []
    previous: list[int] = []
    for i in sorted(range(len(rows)), key=lambda i: rows[i]):
        row = rows[i]
        start = len(ids)
        shared = common_prefix(row, previous)
        path = path[:shared] + list(range(start, start + len(row) - shared))
        ids += row[shared:]
        positions += range(shared, len(row))
        spans[i] = (start, len(ids), torch.tensor(path))
        previous = row
    return Tree(ids, positions, [spans[i] for i in range(len(rows))])


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many tokens two rows share at their start."""
    for length, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return length
    return min(len(first), len(second))


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    scaling: float,
    packed: Tree,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of the tokens that each row adds over the row's path, keys and values gathered.

    As many products as a trie takes.
    """
    out = torch.empty_like(query)
    for start, end, path in packed.rows:
        if start == end:
            continue
        n, m = end - start, len(path)
        is_first = n == m
        causal = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        out[:, :, start:end] = scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, path],
            value[:, :, path],
            attn_mask=None if is_first else causal,
            is_causal=is_first,
            scale=scaling,
            enable_gqa=True,
        )
    return out.transpose(1, 2), None


AttentionInterface.register("tree", tree_attention)


def make_group(chat: Any, style: str, members: int, same: float, rng: random.Random) -> list[Row]:
    """The rows of a group: a turn each with the paper's prompts, an episode each as a conversation.

    The response of an episode is all that follows its first prompt. `same`: the probability that a
    member asks what the others ask at that place.
    """
    pages = sorted((ROOT / "docs").glob("*.md"))
    words = "".join(page.read_text(encoding="utf-8") for page in pages).split()

    def text(count: int) -> str:
        start = rng.randrange(len(words) - count)
        return " ".join(words[start : start + count])

    prompts = PaperStyle() if style == "paper" else ChatStyle()
    question = f"{text(12)}?"
    common_queries: dict[tuple[str, ...], str] = {}
    observations: dict[tuple[str, ...], str] = {}
    """By the queries asked so far."""
    rows = []
    for _ in range(members):
        past: list[tuple[Action, str]] = []
        queries: tuple[str, ...] = ()
        following: list[int] = []
        for _ in range(rng.choice([2, 3, 4])):
            is_common = rng.random() < same
            query = text(6)
            if is_common:
                query = common_queries.setdefault(queries, query)
            queries += (query,)
            results = [text(100) for _ in range(3)]
            observation = observations.setdefault(queries, prompts.observation(results))
            response = f"<think>{text(40)}</think><search>{query}</search>"
            response_ids = chat.response_ids(response)
            if style == "paper":
                rows.append((chat.prompt_ids(prompts.prompt(question, past)), response_ids))
            following += response_ids + chat.separator_ids + chat.observation_ids(observation)
            past.append((Action("search", query), observation))
        if style == "chat":
            rows.append((chat.prompt_ids(prompts.prompt(question, [])), following))
    return rows


def run(policy: Policy, rows: Sequence[Row], *, shared: bool) -> dict[str, float]:
    """Forward and backward of the body for a fixed function of the hidden states that predict
    responses.

    With `shared` as one trie, else in packed rows. Both give the same value and gradient.
    """
    policy.zero_grad()
    policy.lm.set_attn_implementation("tree" if shared else ATTENTION)
    direction = torch.randn(policy.head_weight.shape[1], generator=torch.Generator().manual_seed(0))
    sequences = [prompt + response for prompt, response in rows]
    lengths = [len(sequence) for sequence in sequences]
    value = 0.0
    tokens = 0
    start = time.process_time()
    batches = (
        [list(range(len(rows)))] if shared else batches_of_similar_length(lengths, budget=BUDGET)
    )
    for indices in batches:
        if shared:
            hidden, paths = hidden_of_tree(policy, sequences)
        else:
            hidden, paths = hidden_of_rows(policy, [sequences[i] for i in indices])
        predicting = []  # the positions whose hidden states predict the response of each row
        for i, path in zip(indices, paths, strict=True):
            prompt, _ = rows[i]
            predicting.append(path[len(prompt) - 1 : -1])
        loss = (hidden[torch.cat(predicting)] @ direction).tanh().sum()
        loss.backward()
        value += float(loss.detach())
        tokens += len(hidden)
    cpu_s = time.process_time() - start

    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return {"cpu_s": cpu_s, "tokens": tokens, "value": value, "grad_norm": float(norm)}


def hidden_of_tree(policy: Policy, sequences: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
    """Hidden states [n, D] of a trie's tokens, and for each sequence the positions of its
    tokens."""
    trie = tree(sequences)
    decoder: Any = policy.lm.get_decoder()
    out = decoder(
        input_ids=torch.tensor([trie.input_ids]),
        position_ids=torch.tensor([trie.positions]),
        packed=trie,
        use_cache=False,
    )
    return out.last_hidden_state[0], [path for _, _, path in trie.rows]


def hidden_of_rows(policy: Policy, sequences: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
    """The same of packed rows."""
    ids = [token for sequence in sequences for token in sequence]
    lengths = [len(sequence) for sequence in sequences]
    hidden = policy.hidden(torch.tensor(ids), lengths)
    return hidden, list(torch.arange(len(ids)).split(lengths))


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chat = make_chat()
    settings = hf_config(SHAPES["SmolLM2-135M"])
    settings.num_hidden_layers = options.layers
    policy = Policy(AutoModelForCausalLM.from_config(settings))
    table: list[dict[str, Any]] = []
    for style, members, same in CASES:
        groups = [
            make_group(chat, style, members, same, random.Random(seed)) for seed in range(GROUPS)
        ]
        packed_tokens = 0
        trie_tokens = 0
        for rows in groups:
            sequences = [prompt + response for prompt, response in rows]
            packed_tokens += sum(len(sequence) for sequence in sequences)
            trie_tokens += len(tree(sequences).input_ids)
        row = {
            "style": style,
            "members": members,
            "same": same,
            "packed_tokens": packed_tokens,
            "trie_tokens": trie_tokens,
        }
        if style == "paper" and members == 5:
            row |= compare(policy, groups[0], rounds=options.rounds)
        row |= {
            "layers": options.layers,
            "device": cpu_name(),
            "threads": 1,
            "torch": torch.__version__,
            "commit": code_commit(),
        }
        print(row, flush=True)
        table.append(row)
        write(RESULTS / "shared_prefix_cpu.csv", table)


def compare(policy: Policy, rows: list[Row], *, rounds: int) -> dict[str, float]:
    """How many times as fast a trie is as packed rows, and how many times fewer tokens it has."""
    ratios = []
    columns: dict[str, float] = {}
    for _ in range(rounds):
        packed = run(policy, rows, shared=False)
        shared = run(policy, rows, shared=True)
        for key in ("value", "grad_norm"):
            assert abs(shared[key] / packed[key] - 1) < 1e-3, (key, shared, packed)
        ratios.append(packed["cpu_s"] / shared["cpu_s"])
        columns["of_tokens"] = round(packed["tokens"] / shared["tokens"], 3)
    if ratios:
        columns["rounds"] = rounds
        columns["faster"] = round(median(ratios), 3)
    return columns


if __name__ == "__main__":
    main()
