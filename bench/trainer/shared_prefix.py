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
from paw.algo.packing import alike_batches
from paw.envs.search.prompt import Action, ChatStyle, PaperStyle
from paw.model.attention import ATTENTION
from paw.model.policy import Policy
from paw.state.record import code_commit
from paw.tools.recorded import hf_config
from paw.tools.shapes import SHAPES

BUDGET, GROUPS = 8192, 5
CASES = [("paper", members, same) for members in (5, 8) for same in (0.0, 0.5, 1.0)] + [
    ("chat", 8, 0.0)
]
"""(style, members, same): tokens are counted over GROUPS groups; the first of five members is timed."""
Row = tuple[list[int], list[int]]
"""Prompt and response."""


@dataclass(frozen=True)
class Tree:
    """A trie of rows, flat: row i adds the tokens [start, end) and attends to `path`, what it shares before its own."""

    input_ids: list[int]
    positions: list[int]
    rows: list[tuple[int, int, Tensor]]
    """(start, end, path [length of the row] int64) in the order of the rows."""


def tree(rows: Sequence[list[int]]) -> Tree:
    """Sorted rows share most with the one before."""
    ids, positions, found = list[int](), list[int](), dict[int, tuple[int, int, Tensor]]()
    path, before = list[int](), list[int]()
    for i in sorted(range(len(rows)), key=lambda i: rows[i]):
        row, start = rows[i], len(ids)
        pairs = enumerate(zip(row, before, strict=False))
        shared = next((at for at, (a, b) in pairs if a != b), min(len(row), len(before)))
        path = path[:shared] + list(range(start, start + len(row) - shared))
        ids += row[shared:]
        positions += range(shared, len(row))
        found[i], before = (start, len(ids), torch.tensor(path)), row
    return Tree(ids, positions, [found[i] for i in range(len(rows))])


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
    """Each row's own tokens over their path: no more products than a trie takes, and keys and values gathered."""
    out = torch.empty_like(query)
    for start, end, path in packed.rows:
        if start < end:
            n, m = end - start, len(path)
            seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
            q, k, v = query[:, :, start:end], key[:, :, path], value[:, :, path]
            out[:, :, start:end] = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if n == m else seen,
                is_causal=n == m,
                scale=scaling,
                enable_gqa=True,
            )
    return out.transpose(1, 2), None


AttentionInterface.register("tree", tree_attention)


def make_group(chat: Any, style: str, members: int, same: float, rng: random.Random) -> list[Row]:
    """The rows of a group: a turn each with the paper's prompts, an episode each as a conversation,
    whose targets are all that follows the first prompt."""
    words = "".join(
        path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))
    ).split()

    def text(count: int) -> str:
        at = rng.randrange(len(words) - count)
        return " ".join(words[at : at + count])

    paper, question, known = (
        (PaperStyle if style == "paper" else ChatStyle)(),
        f"{text(12)}?",
        dict[Any, str](),
    )
    rows = []
    for _ in range(members):
        past: list[tuple[Action, str]] = []
        asked: tuple[str, ...] = ()
        whole = list[int]()
        for _ in range(rng.choice([2, 3, 4])):
            query = known.setdefault((asked, "common"), text(6)) if rng.random() < same else text(6)
            asked += (query,)
            seen = known.setdefault(asked, paper.observation([text(100) for _ in range(3)]))
            response = f"<think>{text(40)}</think><search>{query}</search>"
            if style == "paper":
                rows.append(
                    (chat.prompt_ids(paper.prompt(question, past)), chat.response_ids(response))
                )
            whole += chat.response_ids(response) + chat.separator_ids + chat.observation_ids(seen)
            past.append((Action("search", query), seen))
        if style == "chat":
            rows.append((chat.prompt_ids(paper.prompt(question, [])), whole))
    return rows


def run(policy: Policy, rows: Sequence[Row], *, shared: bool) -> dict[str, float]:
    """Forward and backward of the body for a fixed linear function of the hidden states that predict the responses."""
    policy.zero_grad()
    policy.lm.set_attn_implementation("tree" if shared else ATTENTION)
    direction = torch.randn(policy.head_weight.shape[1], generator=torch.Generator().manual_seed(0))
    whole, value, tokens, began = (
        [prompt + response for prompt, response in rows],
        0.0,
        0,
        time.process_time(),
    )
    lengths = [len(row) for row in whole]
    for picked in [list(range(len(rows)))] if shared else alike_batches(lengths, budget=BUDGET):
        if shared:
            one = tree(whole)
            ids, paths = one.input_ids, [path for _, _, path in one.rows]
            keys: Any = {
                "position_ids": torch.tensor([one.positions]),
                "packed": one,
                "use_cache": False,
            }
            hidden = policy.lm.get_decoder()(
                input_ids=torch.tensor([ids]), **keys
            ).last_hidden_state[0]
        else:
            ids = [token for i in picked for token in whole[i]]
            paths = torch.arange(len(ids)).split([lengths[i] for i in picked])
            hidden = policy.hidden(torch.tensor(ids), [lengths[i] for i in picked])
        at = [path[len(rows[i][0]) - 1 : -1] for i, path in zip(picked, paths, strict=True)]
        loss = (hidden[torch.cat(at)] @ direction).tanh().sum()
        loss.backward()
        value, tokens = value + float(loss.detach()), tokens + len(ids)
    spent = time.process_time() - began
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in policy.parameters() if p.grad is not None]
    )
    return {"cpu_s": spent, "tokens": tokens, "value": value, "grad_norm": float(norm)}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chat, table = make_chat(), list[dict[str, Any]]()
    about = {
        "layers": options.layers,
        "device": cpu_name(),
        "threads": 1,
        "torch": torch.__version__,
    }
    settings = hf_config(SHAPES["SmolLM2-135M"])
    settings.num_hidden_layers = options.layers
    policy = Policy(AutoModelForCausalLM.from_config(settings))
    for style, members, same in CASES:
        groups = [
            make_group(chat, style, members, same, random.Random(seed)) for seed in range(GROUPS)
        ]
        whole = [[prompt + response for prompt, response in rows] for rows in groups]
        packed, once = (
            sum(len(row) for rows in whole for row in rows),
            sum(len(tree(rows).input_ids) for rows in whole),
        )
        case = {
            "style": style,
            "members": members,
            "same": same,
            "packed_tokens": packed,
            "trie_tokens": once,
        }
        ratios = []
        for _ in range(options.rounds if style == "paper" and members == 5 else 0):
            apart, shared = (run(policy, groups[0], shared=shared) for shared in (False, True))
            for key in ("value", "grad_norm"):
                assert abs(shared[key] / apart[key] - 1) < 1e-3, (key, shared, apart)
            ratios.append(apart["cpu_s"] / shared["cpu_s"])
            case |= {"of_tokens": round(apart["tokens"] / shared["tokens"], 3)}
        timed = {"rounds": len(ratios), "faster": round(median(ratios), 3)} if ratios else {}
        table.append(case | timed | about | {"commit": code_commit()})
        print(table[-1], flush=True)
        write(RESULTS / "shared_prefix_cpu.csv", table)


if __name__ == "__main__":
    main()
