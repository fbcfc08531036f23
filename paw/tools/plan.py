"""What a configuration needs, by arithmetic: memory (`plan_memory`) and the seconds of an update. Loads no torch.

Every constant is one of three: published (of others' runs, with where), measured (by us, on a CPU), or assumed. SOURCES
says so of each component. `bench/plan_pages.py` holds the times of training against published runs (docs/memory.md).
"""

import math
from dataclasses import dataclass
from typing import Any

from paw.config import Config
from paw.tools.plan_memory import ENGINE_ROWS, GIB, USABLE, Memory
from paw.tools.shapes import Shape

__all__ = ["GIB", "USABLE", "Plan", "Play"]

CARDS = {
    24: (165e12, 1.0e12, 25e9),  # RTX 4090
    40: (312e12, 1.6e12, 300e9),  # A100
    48: (362e12, 0.86e12, 25e9),  # L40S
    80: (989e12, 3.35e12, 450e9),  # H100
    141: (989e12, 4.8e12, 450e9),  # H200
    192: (2250e12, 8.0e12, 900e9),  # B200
}
"""GB of a card: its dense bf16 FLOP/s, bytes/s of its memory, and to another card of the host (data sheets)."""
MFU = 0.40  # assumed before any was compared: share of the FLOP/s in training with torch.compile, and in prefill
EAGER = 0.86  # of that without: torchtitan, Llama-3.1-8B on 128 H100s (llama3_h100_202412, Table 3), 5,605 over 6,514
REACHED = 0.50  # assumed: of the bytes/s of the card's memory, and between cards
NETWORK = 50e9  # bytes/s of a card to other hosts: 400 Gb/s, as in those runs; assumed to be reached
PCIE = 25e9  # assumed: bytes/s to host memory, and of weights into the engine of the process
FILES = 1.6e9  # bytes/s of weights gathered and written: prime-rl's filesystem broadcast, Qwen3-0.6B and 30B-A3B on
# H100s: 1.6 and 1.76 (time between steps over time of a step, benchmarks/baselines at 30bf494f). Assumed of checkpoints
NCCL = 8.25e9  # bytes/s of weights to servers: verl/checkpoint_engine/README.md, Qwen3-30B-A3B to 30 GPUs on 4 hosts
STEP_S = 0.27  # of an optimizer step, however few tokens: prime-rl, Qwen3-0.6B SFT on an H100, the line through 0.62 s
# at 16,384 tokens and 1.28 s at 32,768, FLOPs for tokens (benchmarks/baselines at 30bf494f)
DECODE_S = {"vllm": 5e-3, "server": 5e-3, "transformers": 30e-3}
"""Seconds of a decoding step at least. vLLM: 4 and 5 to 6 ms between steps (vllm issues 6854, 10634); else assumed."""
REDUCE_S = 20e-6  # assumed: an all-reduce among a server's cards, two in each layer
SEQUENCES = 256  # that vLLM decodes at once (paw.rollouts.engines)
HOST_S = 1.5e-6  # measured (bench/results/host_cpu.csv): a core on a token, 1.25 to encode it, the rest to pack it

PROMPT, RESPONSE, OBSERVATION, WON = (0.22, 0.04), (0.20, 0.5), (9.0, 11.0), 0.4
"""Turns as `paw profile --synthetic` draws them. Prompts: mean and deviation, of max_prompt_tokens; observations: least
and exponential mean, in tokens (both measured in generated full-size games of ALFWorld). Assumed: responses, median of
max_response_tokens and sigma of a log-normal; the share of episodes that end early, anywhere before env.max_turns."""

SOURCES = {
    "rollout": "assumed: half the memory's rate; published: 5 ms a step at least; the longest episode has all turns",
    "score": "as the update",
    "update": "published runs: 40 % of the card's peak, 34 % without model.compile; or the gathers, if longer",
    "step": "published: 0.27 s; assumed: half the memory's rate",
    "sync": "published: to servers 8.3 GB/s by NCCL, 1.6 to files; assumed: 25 into the process's own engine",
    "host": "measured: 1.5 us a token on a CPU core",
    "checkpoint": "published: 1.6 GB/s of a host; assumed: 25 of a rank, if --host-gib holds a copy; by run.save_every",
}
"""Of each component of an update's seconds."""


@dataclass(frozen=True)
class Play:
    """What is played for an update: episodes of all ranks, turns of one on average and at most, tokens of a turn."""

    episodes: int
    turns: float
    most: int
    prompt: float
    response: float
    observation: float
    """Of those learnt from, spread over all turns."""

    @property
    def length(self) -> float:
        return self.prompt + self.response

    @classmethod
    def of(cls, config: Config) -> "Play":
        """As `paw profile --synthetic` has it."""
        limits, most = config.rollout, config.env.max_turns
        return cls(
            episodes=limits.tasks * limits.group_size,
            turns=(1 - WON) * most + WON * (most + 1) / 2,
            most=most,
            prompt=PROMPT[0] * limits.max_prompt_tokens,
            response=RESPONSE[0] * math.exp(RESPONSE[1] ** 2 / 2) * limits.max_response_tokens,
            observation=min(sum(OBSERVATION), config.wm.max_tokens) * config.wm.alpha if config.wm.enabled else 0,
        )


class Plan(Memory):
    """Predicts memory, in GiB, and time of an update of `config` on `gpus` cards of `gpu_gib`, on `hosts` machines."""

    def __init__(self, config: Config, shape: Shape, *, play: Play | None = None, **machine: Any) -> None:
        """`machine` is that of `Memory`."""
        super().__init__(config, shape, **machine)
        self.flops, memory, link = CARDS[min(CARDS, key=lambda size: abs(size - self.gpu_gib))]
        self.bandwidth = REACHED * memory
        self.link = NETWORK if self.on_host < self.shards else REACHED * link
        self.play = play or Play.of(config)
        self.seconds = {"rollout": self._rollout()} | self._training()
        """By component, in order; with rollout.ahead the rollout and what follows overlap."""

    @property
    def step_s(self) -> float:
        """Seconds of an update: weights are sent while neither plays nor trains."""
        sync, rollout = self.seconds["sync"], self.seconds["rollout"]
        training = sum(self.seconds.values()) - rollout - sync
        return sync + (max(rollout, training) if self.config.rollout.ahead else rollout + training)

    @property
    def fits(self) -> bool:
        return not self.reasons()

    def reasons(self, *, usable: float = USABLE, rows: int = ENGINE_ROWS) -> list[str]:
        """Why it does not fit into the share `usable` of a GPU with `rows` sequences in the KV cache; empty if so."""
        room, need, found = usable * self.gpu_gib, self.kv_needed(rows), []
        if self.peak > room:
            phase = max(self.phases, key=lambda name: sum(self.phases[name].values()))
            parts = ", ".join(f"{part} {size:.1f}" for part, size in self.phases[phase].items())
            found.append(f"{phase} needs {self.peak:.1f} GiB of a GPU, {room:.1f} are usable ({parts})")
        if self.host_gib is not None and self.host_total > self.host_gib:
            found.append(f"{self.host_total:.1f} GiB of host memory are needed, there are {self.host_gib:.1f}")
        if self.kv_tokens < need:
            found.append(f"the KV cache holds {round(self.kv_tokens):,} tokens, {rows} sequences have {need:,}")
            if self.served:
                found.append(f"a server needs engine.tensor_parallel = {self.least or 'more GPUs than are known'}")
        return found

    # --- the formulas, in seconds -------------------------------------------------------------------------------------

    def _body(self) -> float:
        """FLOPs of the decoder layers for a token, causal attention included."""
        return 2 * self.shape.layers * (self.shape.active_layer + self.shape.queries * self.play.length)

    def _rollout(self) -> float:
        """Decoding by bandwidth and prefill by FLOPs; it ends when an episode of all turns has been played."""
        s, play, size = self.shape, self.play, self.tensor_parallel
        cache = self.kv_tokens if self.vllm or self.served else self._engine()["KV cache"] / s.kv_bytes
        together = max(1.0, min(play.episodes / self.engines, SEQUENCES, cache / play.length))
        read = (self.c * s.parameters + together * play.length * s.kv_bytes) / size
        reduce = 2 * s.layers * REDUCE_S if size > 1 else 0
        step = max(read / self.bandwidth + reduce, DECODE_S[self.config.engine.type])
        turns = play.episodes * play.turns / self.engines
        prefill = turns * play.prompt * self._body() / (self.flops * MFU * size)
        return prefill + max(turns / together, play.most) * play.response * step

    def _training(self) -> dict[str, float]:
        config, s, play, optim = self.config, self.shape, self.play, self.config.optim
        turns, body, head = play.episodes * play.turns / self.N, self._body(), 2 * s.embedding
        rate = self.flops * MFU * (1 if config.model.compile else EAGER)
        tokens, targets = play.length + play.observation, play.response + play.observation
        acting = turns * (play.length * body + play.response * head)
        judging = turns * play.length * body if self.valued else 0
        passes = {"none": 3.0, "selective": 3.5, "full": 4.0}[config.model.checkpointing]
        # The head makes its logits once (paw_kernels.token_loss).
        learning = passes * (turns * tokens * body + judging) + 3 * turns * targets * head
        # The gathers of each pass of a micro-batch over all weights run beside its arithmetic. Adapters save none of
        # the arithmetic in the published runs.
        gather = self.c * (s.parameters + self.valued) / self.link if self.shards > 1 else 0
        reduce = 4 * (self.trained + self.valued) / self.link if self.shards > 1 else 0
        if self.shards < self.N:  # each card then sums its shard over copies: what it has goes out and comes back
            reduce += 2 * 4 * (self.trained + self.valued) / self.shards / (NETWORK if self.hosts > 1 else self.link)
        micro = turns * tokens / self.T
        copied = 2 * self._kept() * micro / PCIE if config.model.offload_activations else 0
        scored = (config.policy.old_logp == "trainer") + (config.policy.kl_coef > 0)  # engines tell entropies
        steps = max(1, round(play.episodes * play.turns / optim.minibatch_samples)) * optim.epochs
        state = 2 * self.optimizer / (PCIE if optim.offload else self.bandwidth)
        moved = 4 * self.stored / self.shards / self.bandwidth  # weights and gradients, read and written
        # Adapters alone, as files, to a vLLM that keeps the base weights.
        keeps = self.served or (self.vllm and config.engine.sleep_level == 1)
        adapters = bool(self.lora.rank) and self.lora.send == "adapters" and keeps
        sent = self.c * (self.trained if adapters else s.parameters)
        to_server = FILES if config.engine.transfer == "files" else NCCL
        saved = self.saved / PCIE if self.copied else self.on_host * self.saved / FILES
        return {
            "score": max((acting * scored + judging) / rate, scored * micro * gather),
            "update": optim.epochs * (max(learning / rate, micro * (2 * gather + reduce)) + copied),
            "step": steps * (STEP_S + state + moved),
            "sync": sent / (FILES if adapters else to_server if self.served else PCIE),
            "host": self.N * turns * tokens * HOST_S,
            "checkpoint": saved / config.run.save_every if config.run.save_every else 0.0,
        }
