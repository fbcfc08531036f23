"""What a configuration needs, by arithmetic: GPU and host memory by component, seconds of an update. Loads no torch.

Memory is that of one GPU, N of them. P parameters, of which B in decoder layers (L in one) and R outside; V vocabulary,
D hidden size; T tokens of a micro-batch. `c` bytes an element in the forward pass, `w` of a stored weight, `g` of its
gradient. All formulas are upper ends: gradients of an earlier micro-batch are there, every token is a target.
`bench/memory.py` holds the update and the step against a simulated one (docs/memory.md). The rest is stated assumption.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from paw.config import Config
from paw.show.shapes import Shape

GIB = 2**30
USABLE = 0.95
"""Share of a GPU's memory to plan with: 76 of 80."""
OVERHEAD = 1.5 * GIB
"""CUDA context, library workspaces, what the allocator loses to fragments."""
ENGINE_WORK = 2.0 * GIB
"""Of vLLM's share: its activations and CUDA graphs; the rest holds weights and KV cache."""
ENGINE_ASLEEP = 1.0 * GIB
"""What a sleeping vLLM leaves on the card."""
ENGINE_ROWS = 8
"""Sequences of full length that the KV cache should at least hold."""
HOST_PROCESS = 6.0 * GIB
"""One trainer process with torch, CUDA and vLLM loaded."""
PINNED = 2.0
"""torch rounds a tensor of page-locked memory up to a power of two; the optimizer's state goes around that."""
SLAB = 2.0 * GIB
"""Granularity of the optimizer's state in host memory (paw.learner.host)."""
CHECKPOINT_PART = 4.0 * GIB
"""What rank 0 gathers before it writes a file of a checkpoint (paw.trust.checkpoint)."""
HEAD_BUFFER = {2: 1440 << 20, 4: 1536 << 20}
"""Chunk of the fused head by bytes of an element: Triton's e and statistics, or plain torch's three float32 buffers."""
FLASH_MOMENTS = 2 + 2 * 2 / 32
"""flash-adamw: two 8-bit moments with a 16-bit scale for every 32; the further bits of the weight come to that."""

PEAK_TFLOPS = {24: 165, 40: 312, 48: 362, 80: 989, 141: 989, 192: 2250}
BANDWIDTH = {24: 1.0e12, 40: 1.6e12, 48: 0.86e12, 80: 3.35e12, 141: 4.8e12, 192: 8.0e12}
"""Dense bf16 TFLOP/s and bytes/s by size of the card: RTX 4090, A100, L40S, H100, H200, B200."""
MFU, DECODE_SHARE, PCIE = 0.40, 0.50, 25e9
"""Share of the peak that training and prefill reach; of the bandwidth in decoding; bytes/s to host memory."""
FULLNESS = 0.5
"""Turns, prompts and responses are this share of their limits (step time only)."""


@dataclass(frozen=True)
class Plan:
    """A prediction. Sizes in GiB."""

    config: Config
    phases: dict[str, dict[str, float]]
    """Components of each phase, of one GPU: rollout, score, update, step."""
    host: dict[str, dict[str, float]]
    """Likewise, of the whole machine: load, update, save, export."""
    seconds: dict[str, float]
    gpus: int
    gpu_gib: float
    host_gib: float | None
    kv_tokens: float
    """Tokens that vLLM's KV cache holds, of the ENGINE_ROWS sequences it should; infinite without vLLM."""

    @property
    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.phases.values())

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    def reasons(self, *, usable: float = USABLE, rows: int = ENGINE_ROWS) -> list[str]:
        """Why it does not fit into the share `usable` of a GPU with `rows` sequences in the KV cache; empty if so."""
        phase = max(self.phases, key=lambda name: sum(self.phases[name].values()))
        need, found = self.kv_needed(rows), []
        if self.peak > usable * self.gpu_gib:
            parts = ", ".join(f"{part} {size:.1f}" for part, size in self.phases[phase].items())
            found.append(
                f"{phase} needs {self.peak:.1f} GiB of a GPU, {usable * self.gpu_gib:.1f} are usable ({parts})"
            )
        if self.host_gib is not None and self.host_total > self.host_gib:
            found.append(f"{self.host_total:.1f} GiB of host memory are needed, there are {self.host_gib:.1f}")
        if self.kv_tokens < need:
            found.append(f"the KV cache holds {max(0, round(self.kv_tokens)):,} tokens, {rows} sequences have {need:,}")
        return found

    def kv_needed(self, rows: int = ENGINE_ROWS) -> int:
        """Tokens of `rows` sequences of full length."""
        return rows * (self.config.rollout.max_prompt_tokens + self.config.rollout.max_response_tokens)

    @property
    def host_total(self) -> float:
        return max(sum(parts.values()) for parts in self.host.values())


def plan(config: Config, shape: Shape, *, gpus: int, gpu_gib: float, host_gib: float | None = None) -> Plan:
    """Predict memory and time of one update of `config` on `gpus` cards of `gpu_gib` GiB."""
    model = _Model(config, shape, gpus)
    phases, host = (
        {name: {part: size / GIB for part, size in parts.items() if size} for name, parts in sizes}
        for sizes in (model.phases(gpu_gib), model.host())
    )
    kv = model.kv_cache(gpu_gib) / shape.kv_bytes if config.rollout.engine == "vllm" else float("inf")
    return Plan(config, phases, host, model.seconds(gpu_gib), gpus, gpu_gib, host_gib, kv)


@dataclass(frozen=True)
class _Model:
    """The formulas, in bytes."""

    config: Config
    shape: Shape
    N: int

    @cached_property
    def c(self) -> int:
        return 2 if self.config.model.dtype == "bfloat16" else 4

    @cached_property
    def w(self) -> int:
        """flash-adamw and LoRA store weights as the forward pass reads them, adamw in float32."""
        return self.c if self.config.optim.name == "flash-adamw" or self.config.lora.rank else 4

    @cached_property
    def casts(self) -> bool:
        """One GPU and float32 weights: autocast makes `c`-byte copies. With several FSDP's gathering does."""
        return self.w != self.c and self.N == 1

    @cached_property
    def stream(self) -> int:
        """Bytes of the residual stream: float32 under autocast, as the norms' weights are."""
        return 4 if self.casts else self.c

    @cached_property
    def trained(self) -> int:
        """Trainable parameters."""
        if not self.config.lora.rank:
            return self.shape.parameters
        sizes = [sum(self.shape.linears[name]) for name in self.config.lora.targets if name in self.shape.linears]
        return self.config.lora.rank * sum(sizes) * self.shape.layers

    @cached_property
    def T(self) -> int:
        return self.config.optim.micro_batch_tokens

    def weights(self) -> float:
        adapters = 4 * self.trained if self.config.lora.rank else 0
        return (self.w * self.shape.parameters + adapters) / self.N

    def gradients(self) -> float:
        """In the dtype of what is trained; float32 adapters. With grad_sync "last" whole float32 sums, unsharded."""
        if self.N > 1 and self.config.optim.grad_sync == "last":
            return 4 * self.trained
        return (4 if self.config.lora.rank else self.w) * self.trained / self.N

    @cached_property
    def state(self) -> float:
        """Bytes of optimizer state a parameter."""
        flash = self.config.optim.name == "flash-adamw"
        return (self.config.optim.master_bits - 16) / 8 + FLASH_MOMENTS if flash else 8

    def optimizer(self) -> float:
        return self.state * self.trained / self.N

    def reference(self) -> float:
        if not self.config.policy.kl_coef or self.config.lora.rank:
            return 0  # LoRA: the policy without its adapters
        return self.w * self.shape.parameters / self.N

    def layer_saved(self) -> float:
        """What one decoder layer keeps for its backward pass, a token."""
        s, c = self.shape, self.c
        D, Q, K, F = s.hidden, s.queries, s.keys, s.intermediate
        # Each norm: its float32 input, x / rms in the stream's dtype, and its output as the linear layers read it
        # (under autocast each of q, k, v, gate and up has a copy of its own).
        scaled = 0 if self.config.lora.rank else self.stream  # only a norm that is trained needs x / rms
        norms = 2 * (4 + scaled) * D + (5 * c if self.casts else 2 * c) * D
        head_norms = (4 + c) * (Q + K) if s.qk_norm else 0
        attention = c * (Q + 2 * K) + c * Q + 4 * s.heads  # q, k, v; the output and its log-sum-exp
        mlp = 4 * c * F  # gate, silu(gate), up, their product
        lora = self.config.lora  # what each A makes of the input that its layer keeps anyway
        adapters = c * lora.rank * len(lora.targets)
        return norms + head_norms + attention + mlp + adapters

    def kept(self) -> float:
        """Activations kept from forward to backward, all layers."""
        s, c, mode = self.shape, self.c, self.config.model.checkpointing
        inputs = self.stream * s.hidden
        # selective: the outputs of q, v, gate and down (every second product) and of attention.
        products = c * (2 * s.queries + s.keys + s.intermediate + s.hidden) + 4 * s.heads
        layer = {"none": self.layer_saved(), "selective": inputs + products, "full": inputs}[mode]
        return s.layers * layer * self.T

    def recomputed(self) -> float:
        """Beside them while the backward pass is in one layer: what it recomputes, and two gradients of the MLP."""
        again = 0 if self.config.model.checkpointing == "none" else self.layer_saved()
        return (again + 2 * self.c * self.shape.intermediate) * self.T

    def head(self) -> tuple[float, float]:
        """The fused head in the forward pass beside hidden states: (its results dL/dh and dW, its workspace)."""
        s, c = self.shape, self.c
        results = c * (s.hidden * self.T + s.embedding)
        row = c * (s.vocabulary + 3 * s.hidden) + 16 * s.vocabulary / 256 if c == 2 else 12 * s.vocabulary
        if row * self.T <= HEAD_BUFFER[c]:
            return results, row * self.T
        # Several chunks: dW is summed in float32 and rounded when the buffer is gone.
        total = 4 * s.embedding
        return results, max(HEAD_BUFFER[c] + total - c * s.embedding, total if c == 2 else 0)

    def update(self) -> Iterator[tuple[float, float]]:
        """(activations, head) at the moments of a forward and backward pass that can be its peak."""
        s, c, N = self.shape, self.c, self.N
        offloaded = self.config.model.offload_activations
        kept = 0.0 if offloaded else self.kept()
        one = self.recomputed() + (self.layer_saved() * self.T if offloaded else 0)
        tail = (4 + self.stream + c) * s.hidden * self.T  # of the last norm
        gathered = c * s.rest if N > 1 else 0  # embedding and head, whole during a pass
        body = c * s.layers * s.layer if self.casts else 0  # autocast's copies last until the forward ends
        lasting = body if self.config.model.checkpointing == "none" else 0
        results, workspace = self.head()
        # dW waits for the embedding's gradient where they are tied, and for its reduction where sharded.
        waits = s.tied or N > 1
        head_g = (self.w if N == 1 else c) * s.embedding * (0 if self.config.lora.rank else 1)
        per_layer = 2 * c * s.layer if N > 1 else 0  # gathered, and the buffer it came in, or the next one
        reduced = 4 * s.layer if N > 1 and not self.config.lora.rank else 0
        yield kept + body + per_layer + gathered + self.layer_saved() * self.T, 0  # the last layer's forward
        copies = c * s.embedding if self.casts else 0
        yield kept + tail + lasting + gathered, copies + c * s.hidden * self.T + results + workspace
        yield kept + one + lasting + gathered + per_layer + reduced, head_g if waits else 0
        # The end of the backward pass: dE beside dW, their sum, and float32 on the way to other ranks.
        yield 0, head_g + (2 * head_g if s.tied else 0) + (4 * s.rest if N > 1 else 0)

    def step(self) -> float:
        """Temporaries of the optimizer's step: the state of one parameter at a time, where it is offloaded."""
        return self.state * self.shape.embedding / self.N if self.config.optim.offload else 0

    def engine(self, gpu_gib: float) -> dict[str, float]:
        """Awake, on one card: its weights and KV cache. `transformers` alone on the card plays on the policy's."""
        rollout, s = self.config.rollout, self.shape
        if rollout.engine == "vllm":
            share = rollout.gpu_memory_utilization * gpu_gib * GIB
            weights = self.c * s.parameters
            return {"engine": weights + ENGINE_WORK, "KV cache": max(0.0, share - weights - ENGINE_WORK)}
        longer = 1 + rollout.max_response_tokens / rollout.max_prompt_tokens
        cache = s.kv_bytes * self.c / 2 * rollout.max_batch_tokens * longer
        return {"engine": self.w * s.parameters if self.N > 1 else 0, "KV cache": cache}

    def kv_cache(self, gpu_gib: float) -> float:
        """May be negative, where vLLM's share does not even hold the weights."""
        share = self.config.rollout.gpu_memory_utilization * gpu_gib * GIB
        return share - self.c * self.shape.parameters - ENGINE_WORK

    def phases(self, gpu_gib: float) -> Iterator[tuple[str, dict[str, float]]]:
        """The components of each phase."""
        config, s = self.config, self.shape
        vllm = config.rollout.engine == "vllm"
        resident = {"weights": self.weights(), "optimizer": 0 if config.optim.offload else self.optimizer()}
        reference = {} if config.policy.offload_reference else {"reference": self.reference()}
        asleep = {"engine": ENGINE_ASLEEP if vllm else self.engine(gpu_gib)["engine"], "overhead": OVERHEAD}
        overhead = {"overhead": OVERHEAD}
        yield "rollout", resident | reference | self.engine(gpu_gib) | overhead
        copies = self.c * s.layers * s.layer if self.casts else 0
        forward = (self.layer_saved() * self.T) + copies + (self.c * (s.rest + 2 * s.layer) if self.N > 1 else 0)
        # Alone, an offloaded reference visits the card; with several it comes layer by layer.
        scored = {} if config.policy.offload_reference and self.N > 1 else {"reference": self.reference()}
        yield "score", resident | scored | {"activations": forward} | asleep
        activations, head = max(self.update(), key=sum)
        parts = {"gradients": self.gradients(), "activations": activations, "head": head}
        yield "update", resident | reference | parts | asleep
        parts = {"gradients": self.gradients(), "step": self.step()}
        yield "step", resident | reference | parts | asleep

    def host(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Of the machine, all its ranks. Rank 0 loads the whole model, and gathers it in the end to export it."""
        config, s, whole = self.config, self.shape, self.w * self.shape.parameters
        offloads = config.policy.offload_reference
        reference = self.reference() * self.N
        sleeping = config.rollout.engine == "vllm" and config.rollout.sleep_level == 1
        processes = {"processes": HOST_PROCESS * self.N}
        yield "load", processes | {"weights": whole, "reference": reference if self.N > 1 or offloads else 0}
        resident = processes | {
            "optimizer": (self.optimizer() + SLAB) * self.N if config.optim.offload else 0,
            "reference": reference * (PINNED if self.N > 1 else 1) if offloads else 0,
            "engine": PINNED * self.c * self.shape.parameters * self.N if sleeping else 0,
        }
        yield (
            "update",
            resident | {"activations": PINNED * self.kept() * self.N if config.model.offload_activations else 0},
        )
        yield "save", resident | {"checkpoint": min(CHECKPOINT_PART, whole) + self.c * s.embedding}
        yield "export", processes | {"weights": whole}

    def seconds(self, gpu_gib: float) -> dict[str, float]:
        """One update by roofline: MFU of the peak in training and prefill, decoding by bandwidth."""
        config, s, limits = self.config, self.shape, self.config.rollout
        card = min((size for size in PEAK_TFLOPS), key=lambda size: abs(size - gpu_gib))
        rate, bandwidth = PEAK_TFLOPS[card] * 1e12 * MFU, BANDWIDTH[card] * DECODE_SHARE
        prompt, response = FULLNESS * limits.max_prompt_tokens, FULLNESS * limits.max_response_tokens
        episodes = limits.tasks * limits.group_size
        rows = episodes * FULLNESS * config.env.max_turns / self.N
        observation = FULLNESS * config.wm.max_tokens * config.wm.alpha if config.wm.enabled else 0
        body = 2 * s.layers * (s.layer + s.queries * (prompt + response))  # FLOPs a token, causal attention included
        acting = rows * ((prompt + response) * body + response * 2 * s.embedding)
        learning = rows * ((prompt + response + observation) * body + (response + observation) * 2 * s.embedding)
        again = {"none": 3.0, "selective": 3.5, "full": 4.0}[config.model.checkpointing]
        length = prompt + response
        cached = self.engine(gpu_gib)["KV cache"] / s.kv_bytes
        together = max(1.0, min(episodes / self.N, cached / length))
        read = self.c * s.parameters + together * length * s.kv_bytes
        steps = max(1, round(rows * self.N / config.optim.minibatch_rows)) * config.optim.epochs
        streamed = 2 * self.optimizer() / PCIE if config.optim.offload else 0
        kept = 2 * self.kept() * config.optim.epochs * rows * (length + observation) / self.T / PCIE
        return {
            "rollout": rows * response / together * read / bandwidth + rows * prompt * body / rate,
            "score": acting * (2 if config.policy.kl_coef else 1) / rate,
            "update": config.optim.epochs * again * learning / rate + (kept if config.model.offload_activations else 0),
            "step": steps * streamed,
            "sync": self.c * s.parameters / PCIE,
        }
