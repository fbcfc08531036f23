"""Predicts by arithmetic the memory and the seconds of an update. Loads no torch.

Every constant is published (by others, with the source), measured (by us, on a CPU) or assumed.
SOURCES says which of these for each component. `bench/trainer/plan_pages.py` compares training
times with published runs (docs/memory.md).
"""

import math
from dataclasses import dataclass

from paw.config.sections import Config
from paw.tools.plan.elementwise import assumed_layers, saved_traffic
from paw.tools.plan.plan_memory import ENGINE_ROWS, GIB, USABLE, Memory
from paw.tools.plan.shapes import Shape

__all__ = ["GIB", "USABLE", "Plan", "Play"]

CARDS = {
    24: (165e12, 1.0e12, 25e9),  # RTX 4090
    40: (312e12, 1.6e12, 300e9),  # A100
    48: (362e12, 0.86e12, 25e9),  # L40S
    80: (989e12, 3.35e12, 450e9),  # H100
    141: (989e12, 4.8e12, 450e9),  # H200
    192: (2250e12, 8.0e12, 900e9),  # B200
}
"""(dense bf16 FLOP/s, bytes/s of memory, bytes/s to another card of the host), by GB of a card.

From data sheets.
"""
MFU = 0.40
"""Share of peak FLOP/s in training with fused layers, and in prefill.

Assumed before any comparison.
"""
STREAMED = 0.73
"""Share of the memory's bytes/s at which eager layers move the data that fused ones do not.

torchtitan, Llama-3.1-8B on 128 H100s (llama3_h100_202412, Table 3): 5,605 tokens/s of a GPU without
torch.compile and 6,514 with it, so 24.9 us a token, for the traffic of `plan.elementwise`.
"""
REACHED = 0.50
"""Achieved share of the bytes/s of the card's memory and between cards. Assumed."""
NETWORK = 50e9
"""Bytes/s from a card to other hosts: 400 Gb/s, as in those runs. Assumed to be reached."""
PCIE = 25e9
"""Bytes/s to host memory, and of weights into an engine in the process. Assumed."""
FILES = 1.6e9
"""Bytes/s of weights that are gathered and written. For checkpoints this is assumed.

prime-rl's filesystem broadcast, Qwen3-0.6B and 30B-A3B on H100s: 1.6 and 1.76 (time between steps
over time of a step, benchmarks/baselines at 30bf494f).
"""
NCCL = 8.25e9
"""Bytes/s of weights to servers.

verl/checkpoint_engine/README.md, Qwen3-30B-A3B to 30 GPUs on 4 hosts.
"""
STEP_S = 0.27
"""Seconds of an optimizer step, even with few tokens.
prime-rl, Qwen3-0.6B SFT on an H100: the line through 0.62 s at 16,384 tokens and 1.28 s at 32,768,
FLOPs for tokens (benchmarks/baselines at 30bf494f).
"""
REDUCE_S = 20e-6
"""Seconds of an all-reduce among a server's cards, two in each layer. Assumed."""
MOST_SEQUENCES = 1024
"""Maximum number of sequences that a plan proposes to decode together.

vLLM's own largest default, on cards of 70 GiB or more (vllm/engine/arg_utils.py).
"""
HOST_S = 1.6e-6
"""Seconds of a core per token, of which 1.25e-6 encode it.

Measured (bench/results/host_cpu.csv, host_part_cpu.csv).
"""
TURN_S = 3.5e-6
"""Seconds of a core on each rank per turn of all ranks, for its numbers and placing its rows.

Measured as one of 512 ranks (bench/results/exchange_simulated.csv).
"""

# Turns as `paw profile --synthetic` draws them. "Measured" means in generated full-size games of
# ALFWorld.
PROMPT = (0.22, 0.04)
"""Mean and deviation of a prompt's length, as shares of max_prompt_tokens. Measured."""
RESPONSE = (0.20, 0.5)
"""Median, as a share of max_response_tokens, and sigma of a response's log-normal length.

Assumed.
"""
OBSERVATION = (9.0, 11.0)
"""Minimum length of an observation, and the mean of the exponential rest, in tokens. Measured."""
WON = 0.4
"""Share of episodes that end early, anywhere before env.max_turns. Assumed."""

SOURCES = {
    "rollout": "assumed: half the memory's rate; published: 5 ms a step at least; the longest "
    "episode has all turns",
    "score": "as the update",
    "update": "published runs: 40 % of the card's peak with fused layers; eager ones also move "
    "what was counted, at 73 % of the memory's rate; or the gathers, if longer",
    "step": "published: 0.27 s; assumed: half the memory's rate",
    "sync": "published: to servers 8.3 GB/s by NCCL, 1.6 to files; assumed: 25 into the process's "
    "own engine",
    "host": "measured: 1.6 us a token on a CPU core, for the tokens that a rank holds, and 3.5 us "
    "a turn of all ranks",
    "checkpoint": "published: 1.6 GB/s of a host; assumed: 25 of a rank, if --host-gib holds a "
    "copy; by run.save_every",
}
"""Source of each component of an update's seconds."""


@dataclass(frozen=True)
class Play:
    """The episodes played for an update."""

    episodes: int
    """Of all ranks."""
    turns: float
    """Turns of an episode, on average."""
    longest: int
    """Turns of the longest episode."""
    prompt: float
    """Average tokens of a turn's prompt. `response` is the same for responses."""
    response: float
    observation: float
    """Tokens of observations to train on, spread over all turns."""

    @property
    def length(self) -> float:
        """Tokens of a turn without its observation."""
        return self.prompt + self.response

    @classmethod
    def of(cls, config: Config) -> "Play":
        """Return the averages of what `paw profile --synthetic` draws."""
        limits = config.rollout
        max_turns = config.env.max_turns
        median, sigma = RESPONSE
        observation = 0
        if config.wm.enabled:
            observation = min(sum(OBSERVATION), config.wm.max_tokens) * config.wm.alpha
        return cls(
            episodes=limits.tasks * limits.group_size,
            turns=(1 - WON) * max_turns + WON * (max_turns + 1) / 2,
            longest=max_turns,
            prompt=PROMPT[0] * limits.max_prompt_tokens,
            response=median * math.exp(sigma**2 / 2) * limits.max_response_tokens,
            observation=observation,
        )


class Plan(Memory):
    """Predicts the memory, in GiB, and the time of an update."""

    def __init__(
        self,
        config: Config,
        shape: Shape,
        *,
        gpus: int,
        gpu_gib: float,
        host_gib: float | None = None,
        hosts: int = 1,
        play: Play | None = None,
    ) -> None:
        super().__init__(config, shape, gpus=gpus, gpu_gib=gpu_gib, host_gib=host_gib, hosts=hosts)
        nearest_size = min(CARDS, key=lambda size: abs(size - self.gpu_gib))
        self.flops, memory_rate, link_rate = CARDS[nearest_size]
        self.bandwidth = REACHED * memory_rate
        self.streaming = STREAMED * memory_rate
        self.layers = assumed_layers(config.model)
        """How layers are assumed to be computed: "compiled", "Liger's kernels" or "eager"."""
        self.link = NETWORK if self.on_host < self.shards else REACHED * link_rate
        self.play = play or Play.of(config)
        self.seconds = {"rollout": self._rollout()} | self._training()
        """Seconds by component, in order. With rollout.ahead the rollout overlaps with the rest."""

    @property
    def step_s(self) -> float:
        """Return seconds per update. While weights are sent, nothing is played or trained."""
        sync = self.seconds["sync"]
        rollout = self.seconds["rollout"]
        training = sum(self.seconds.values()) - rollout - sync
        if self.config.rollout.ahead:
            return sync + max(rollout, training)
        return sync + (rollout + training)

    @property
    def fits(self) -> bool:
        return not self.reasons()

    def reasons(self, *, usable: float = USABLE, rows: int = ENGINE_ROWS) -> list[str]:
        """Return reasons why the configuration does not fit; [] if it does.

        Args:
            usable: share of a GPU's memory to plan with.
            rows: sequences of full length that the KV cache must hold.
        """
        reasons = []
        usable_gib = usable * self.gpu_gib
        if self.peak > usable_gib:
            phase = max(self.phases, key=lambda name: sum(self.phases[name].values()))
            part_texts = ", ".join(
                f"{part} {part_gib:.1f}" for part, part_gib in self.phases[phase].items()
            )
            reasons.append(
                f"{phase} needs {self.peak:.1f} GiB of a GPU, "
                f"{usable_gib:.1f} are usable ({part_texts})"
            )
        if self.host_gib is not None and self.host_total > self.host_gib:
            reasons.append(
                f"{self.host_total:.1f} GiB of host memory are needed, there are "
                f"{self.host_gib:.1f}"
            )
        needed = self.kv_needed(rows)
        if self.kv_tokens < needed:
            reasons.append(
                f"the KV cache holds {round(self.kv_tokens):,} tokens, {rows} sequences have "
                f"{needed:,}"
            )
            if self.served:
                reasons.append(
                    "a server needs engine.tensor_parallel = "
                    f"{self.engine.least_cards or 'more GPUs than are known'}"
                )
        return reasons

    @property
    def useful_sequences(self) -> int:
        """Sequences that an engine should decode together.

        This is as many as its KV cache holds at the average length of a turn, but at most the
        episodes in play at a time: those of an update and the updates ahead, or of an evaluation.
        """
        config = self.config
        episodes = self.play.episodes * (1 + config.rollout.ahead)
        episodes_of_engine = math.ceil(max(episodes, config.eval.games) / self.engine.engines)
        cached = self.engine.cache_tokens / self.play.length
        return max(1, math.floor(min(episodes_of_engine, cached, MOST_SEQUENCES)))

    # --- the formulas, in seconds

    def _body(self) -> float:
        """Return FLOPs of the decoder layers for a token, including causal attention."""
        s = self.shape
        return 2 * s.layers * (s.active_layer + s.queries * self.play.length)

    def _rollout(self) -> float:
        """Return seconds until the longest episode ends.

        Bandwidth limits decoding, and FLOPs limit prefill. Returns 0 if no GPU of the plan decodes.
        """
        s = self.shape
        play = self.play
        engine = self.engine
        if not engine.decodes:
            return 0.0
        cards = engine.cards

        together = min(
            play.episodes / engine.engines, engine.sequences, engine.cache_tokens / play.length
        )
        together = max(1.0, together)
        read_bytes = (self.c * s.parameters + together * play.length * s.kv_bytes) / cards
        reduce_s = 2 * s.layers * REDUCE_S if cards > 1 else 0
        token_s = max(read_bytes / self.bandwidth + reduce_s, engine.least_step_s)

        turns = play.episodes * play.turns / engine.engines
        prefill_s = turns * play.prompt * self._body() / (self.flops * MFU * cards)
        return prefill_s + max(turns / together, play.longest) * play.response * token_s

    def _training(self) -> dict[str, float]:
        config = self.config
        play = self.play
        turns = play.episodes * play.turns / self.N
        tokens = play.length + play.observation
        micro_batches = turns * tokens / self.T

        # FLOPs. The head makes its logits once (paw_kernels.token_loss).
        body = self._body()
        head = 2 * self.shape.embedding
        policy_forward = turns * (play.length * body + play.response * head)
        critic_forward = turns * play.length * body if self.critic_parameters else 0
        passes = {"none": 3.0, "selective": 3.5, "full": 4.0}[config.model.checkpointing]
        targets = play.response + play.observation
        learning = passes * (turns * tokens * body + critic_forward) + 3 * turns * targets * head
        rate = self.flops * MFU
        eager_forward, eager_backward = self._eager_seconds()

        gather, gather_again, reduce = self._communication()
        offloaded = 0.0
        if config.model.offload_activations:
            offloaded = 2 * self._kept() * micro_batches / PCIE
        # These are passes of the policy and of the reference.
        scored = self._scores_policy() + (config.policy.kl_coef > 0)
        epochs = config.optim.epochs
        steps = max(1, round(play.episodes * play.turns / config.optim.minibatch_samples)) * epochs
        state_s = 2 * self.optimizer / (PCIE if config.optim.offload else self.bandwidth)
        # Weights and gradients are read and written.
        weights_s = 4 * self.stored / self.shards / self.bandwidth
        checkpoint_s = self.on_host * self.saved / FILES
        if self.copied:
            checkpoint_s = self.saved / PCIE

        models = 2 if self.critic_parameters else 1
        scored_tokens = turns * play.length * (scored + models - 1)
        scoring_s = (
            policy_forward * scored + critic_forward
        ) / rate + scored_tokens * eager_forward
        forwards = 1 if config.model.checkpointing == "none" else 2
        token_s = forwards * eager_forward + eager_backward
        learning_s = learning / rate + turns * (tokens + play.length * (models - 1)) * token_s
        learning_s = max(learning_s, micro_batches * (gather + gather_again + reduce))
        return {
            "score": max(scoring_s, scored * micro_batches * gather),
            "update": epochs * (learning_s + offloaded),
            "step": steps * (STEP_S + state_s + weights_s),
            "sync": self._sync(),
            "host": sum(self.host_seconds()),
            "checkpoint": checkpoint_s / config.run.save_every if config.run.save_every else 0.0,
        }

    def host_seconds(self) -> tuple[float, float]:
        """Return a core's seconds for (the tokens that a rank holds, the numbers of all turns)."""
        turns = self.play.episodes * self.play.turns
        tokens_of_rank = turns / self.N * (self.play.length + self.play.observation)
        return tokens_of_rank * HOST_S, turns * TURN_S

    def _eager_seconds(self) -> tuple[float, float]:
        """Return the extra seconds of eager layers for a token, (forward, backward); 0 if fused."""
        if self.layers != "eager":
            return 0.0, 0.0
        saved = saved_traffic(self.shape)
        seconds_of_byte = self.shape.layers * self.c / 2 / self.streaming
        return saved.forward * seconds_of_byte, saved.backward * seconds_of_byte

    def _scores_policy(self) -> bool:
        """Whether the policy's log-probs or entropies need a separate pass."""
        wm = self.config.wm
        needs_entropy = wm.enabled and wm.entropy == "full"
        from_engine = self.config.policy.old_logp == "engine"
        return not from_engine or (needs_entropy and not self.engine_type.gives_entropy)

    def _communication(self) -> tuple[float, float, float]:
        """Return a micro-batch's seconds to (gather weights, gather them again, reduce gradients).

        The backward pass gathers all but embedding and head again. All of this overlaps with the
        arithmetic. In the published runs adapters do not save any of the arithmetic.
        """
        trained = self.trained_parameters + self.critic_parameters
        gather = gather_again = reduce = 0.0
        if self.shards > 1:
            models = 2 if self.critic_parameters else 1
            layers = models * self.shape.layers * self.shape.layer
            gather = self.c * (self.shape.parameters + self.critic_parameters) / self.link
            gather_again = self.c * layers / self.link
            reduce = 4 * trained / self.link
        if self.shards < self.N:
            # Each card sums its shard over the copies, so the shard is sent and received.
            reduce += 2 * 4 * trained / self.shards / (NETWORK if self.hosts > 1 else self.link)
        return gather, gather_again, reduce

    def _sync(self) -> float:
        """Return the seconds to send the weights to the engines."""
        sent_bytes = self.engine.sent_bytes
        if sent_bytes is None:
            sent_bytes = self.c * self.shape.parameters
        rate = {"memory": PCIE, "nccl": NCCL, "files": FILES}[self.engine.sent_by]
        return sent_bytes / rate
