"""Predicts by arithmetic the memory that a configuration needs. Loads no torch.

It predicts the memory of a GPU, of a server's GPU and of a host.

Sizes are those of one GPU out of N, or of one host. T is the tokens of a micro-batch. c is the
bytes of an element in the forward pass. w is the bytes of an element of a stored weight. All
formulas are upper bounds: the gradients of an earlier micro-batch are present, and every token is a
target. `bench/trainer/memory.py` compares update and step with simulated ones (docs/memory.md). The
rest are stated assumptions.
"""

from paw.config.sections import Config
from paw.errors import UserError
from paw.rollouts.engines import find_engine, plan_engine
from paw.rollouts.engines.base import PlannedRun
from paw.tools.plan.shapes import Shape

GIB = 2**30
USABLE = 0.95
"""Share of a GPU's memory to plan with: 76 of 80."""
OVERHEAD = 1.5 * GIB
"""Bytes of CUDA's context, library workspaces, and fragmentation of the allocator."""
ENGINE_ROWS = 8
"""Minimum number of sequences of full length that the KV cache should hold."""
HOST_PROCESS = 6.0 * GIB
"""Bytes of one trainer process with torch, CUDA and vLLM loaded."""
PINNED = 2.0
"""torch rounds a page-locked tensor up to a power of two. The optimizer's state avoids this."""
SLAB = 2.0 * GIB
"""Granularity of the optimizer's state in host memory, in bytes (paw.model.host)."""
CHECKPOINT_PART = 4.0 * GIB
"""Bytes of host memory a rank uses to write a checkpoint file (paw.checkpoint.files)."""
HEAD_BUFFER = {2: 1440 << 20, 4: 1536 << 20}
"""Bytes of a chunk of the fused head, by bytes of an element.

Triton's e and statistics for 2, plain torch's three float32 buffers for 4.
"""
FLASH_MOMENTS = 2 + 2 * 2 / 32
"""flash-adamw: bytes of two 8-bit moments with a 16-bit scale for every 32.

The weight's extra bits come on top.
"""
PLAIN_STATE = 12
"""flash-adamw: bytes of a norm's or bias's parameter, its weight and moments in float32."""


class Memory:
    """Predicts the memory that `config` needs.

    The run has `gpus` cards of `gpu_gib` in `hosts` machines, each with `host_gib` (None if not
    limited). Predictions (`phases`, `host`, `peak`, `host_total`) are in GiB, other sizes in bytes.

    Servers that the run starts take their cards from `gpus`. Those of engine.urls have their own
    cards. Raises UserError if the servers leave no card to train on.
    """

    def __init__(
        self,
        config: Config,
        shape: Shape,
        *,
        gpus: int,
        gpu_gib: float,
        host_gib: float | None = None,
        hosts: int = 1,
    ) -> None:
        self.config = config
        self.shape = shape
        self.gpus = gpus
        self.gpu_gib = gpu_gib
        self.host_gib = host_gib
        self.hosts = hosts
        self.N = gpus - config.engine.gpus
        if self.N < 1:
            raise UserError(
                f"{gpus} GPUs: engine.servers take {config.engine.gpus}, none is left to train on"
            )
        cards_of_host = -(-gpus // hosts)
        self.on_host = min(self.N, cards_of_host)
        self.shards = {"none": 1, "node": self.on_host, "world": self.N}[config.model.shard]
        self.lora = config.lora
        self.T = config.optim.micro_batch_tokens
        self.flash = config.optim.name == "flash-adamw"
        self.c = 4 if config.model.dtype == "float32" else 2  # "auto" is bfloat16 on a card

        # flash-adamw and LoRA store weights in the dtype that the forward pass reads, adamw stores
        # float32.
        self.w = self.c if self.flash or self.lora.rank else 4
        self.weight_bytes = self.w * shape.parameters
        self.trained_parameters = self._trained_parameters()
        self.critic_parameters = self._critic_parameters()

        self.engine_type = find_engine(config.engine.type)
        self.engine = plan_engine(self._planned_run())

        self.copied = False
        """Whether a checkpoint is copied to host memory at once, not in parts; see `_host`."""
        self.phases = _in_gib(self._phases())
        """Components of each phase on one GPU: rollout, score, update, step.

        They include the phase "server", on one GPU of an engine that has its own GPUs.
        """
        self.host = _in_gib(self._host())
        """Components of each phase (load, update, save, export) for all ranks of the first host."""
        self.peak = _largest_sum(self.phases)
        self.host_total = _largest_sum(self.host)

    @property
    def served(self) -> bool:
        """Whether the engines have their own cards."""
        return not self.engine_type.shares_card

    @property
    def kv_tokens(self) -> float:
        """Return tokens that an engine's KV cache holds; infinite if it grows as needed."""
        if self.engine.cache_is_fixed:
            return self.engine.cache_tokens
        return float("inf")

    def kv_needed(self, rows: int = ENGINE_ROWS) -> int:
        """Return tokens of `rows` sequences of full length."""
        limits = self.config.rollout
        return rows * (limits.max_prompt_tokens + limits.max_response_tokens)

    def _planned_run(self) -> PlannedRun:
        """Return what the engine's own plan depends on."""
        return PlannedRun(
            config=self.config,
            ranks=self.N,
            gpu_bytes=self.gpu_gib * GIB,
            weight_bytes=self.c * self.shape.parameters,
            element_bytes=self.c,
            adapter_bytes=self.c * self.trained_parameters if self.lora.rank else 0,
            copies_weights=self.casts,
            kv_bytes=self.shape.kv_bytes,
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            cache_wanted=self.kv_needed(),
        )

    # --- sizes in bytes

    @property
    def casts(self) -> bool:
        """Whether a layer has `c`-byte copies of its weights while it runs.

        It does with one GPU and float32 weights. With several GPUs the copies come from FSDP's
        gathering.
        """
        return self.w != self.c and self.N == 1

    @property
    def copy(self) -> int:
        """Bytes of those copies, for one layer."""
        return self.c * self.shape.layer if self.casts else 0

    @property
    def critic(self) -> float:
        """Bytes of a rank's share of the critic's weights."""
        return self.w * self.critic_parameters / self.shards

    @property
    def reference(self) -> float:
        """A rank's share of the reference model. With LoRA that is the policy without adapters."""
        if self.config.policy.kl_coef and not self.lora.rank:
            return self.weight_bytes / self.shards
        return 0

    @property
    def state(self) -> float:
        """Bytes of the optimizer's state for one parameter."""
        if self.flash:
            return (self.config.optim.master_bits - 16) / 8 + FLASH_MOMENTS
        return 8

    @property
    def optimizer(self) -> float:
        """A rank's share of the optimizer's state."""
        state_bytes = self.state * (self.trained_parameters + self.critic_parameters)
        if self.flash:
            models = 2 if self.critic_parameters > 0 else 1
            state_bytes += (PLAIN_STATE - self.state) * self.shape.vectors * models
        return state_bytes / self.shards

    @property
    def stored(self) -> int:
        """Bytes of all trained weights as stored. Adapters are in float32."""
        all_trained = self.trained_parameters + self.critic_parameters
        return (4 if self.lora.rank else self.w) * all_trained

    @property
    def saved(self) -> float:
        """Bytes of weights and optimizer state that a rank writes into a checkpoint."""
        return self.stored / self.shards + self.optimizer

    # --- the formulas, in bytes

    def _trained_parameters(self) -> int:
        if not self.lora.rank:
            return self.shape.parameters
        linears = self.shape.linears
        adapted = [linears[name] for name in self.lora.targets if name in linears]
        widths = sum(inputs + outputs for inputs, outputs in adapted)
        return self.lora.rank * widths * self.shape.layers

    def _critic_parameters(self) -> int:
        """PPO's critic has a head of one row.

        Its step needs no more than the policy's.
        """
        if not self.config.advantage.traits.needs_critic:
            return 0
        vocabulary_head = 0 if self.shape.tied else self.shape.embedding
        return self.shape.parameters - vocabulary_head + self.shape.hidden + 1

    def _gradients(self) -> float:
        """Return bytes of gradients, in the dtype of the trained weights; adapters' are float32.

        With grad_sync "last" they are unsharded float32 sums.
        """
        if self.N > 1 and self.config.optim.grad_sync == "last":
            return 4 * self.trained_parameters
        return (4 if self.lora.rank else self.w) * self.trained_parameters / self.shards

    def _layer_saved(self) -> int:
        """Return bytes that one decoder layer keeps for its backward pass."""
        s = self.shape
        c = self.c
        D = s.hidden
        Q = s.queries
        K = s.keys
        F = s.intermediate

        # Each norm: its float32 input, x / rms, and its output as the linear layers read it.
        scaled = 0 if self.lora.rank else c  # only a norm that is trained needs x / rms
        norms = 2 * (4 + scaled + c) * D
        head_norms = (4 + c) * (Q + K) if s.qk_norm else 0
        attention = c * (Q + 2 * K) + c * Q + 4 * s.heads  # q, k, v; the output and its log-sum-exp
        mlp = 4 * c * s.active * F  # gate, silu(gate), up, their product
        if s.experts:
            mlp += 2 * c * s.active * D  # a token's copy for each of its experts, and their outputs
        # The output of each A; its input is kept anyway.
        adapters = c * self.lora.rank * len(self.lora.targets)
        return (norms + head_norms + attention + mlp + adapters) * self.T

    def _kept(self) -> int:
        """Return bytes of activations kept from forward to backward, in all layers."""
        s = self.shape
        c = self.c
        mode = self.config.model.checkpointing
        if mode == "none":
            return s.layers * self._layer_saved()
        kept_of_token = c * s.hidden
        if mode == "selective":
            # The outputs of q, v, gate and down (every second product) and of attention too.
            products = s.queries + s.keys + s.active * s.intermediate + s.hidden
            kept_of_token += c * (products + s.queries) + 4 * s.heads
        return s.layers * kept_of_token * self.T

    def _head(self) -> tuple[float, float]:
        """Return (results dL/dh and dW, workspace) of the fused head in the forward pass.

        Hidden states are not included.
        """
        s = self.shape
        c = self.c
        results = c * (s.hidden * self.T + s.embedding)
        row_bytes = 12 * s.vocabulary
        if c == 2:
            row_bytes = c * (s.vocabulary + 3 * s.hidden) + 16 * s.vocabulary / 256
        if row_bytes * self.T <= HEAD_BUFFER[c]:
            return results, row_bytes * self.T

        # With several chunks, dW is summed in float32. In 16 bits it is rounded after the buffer
        # has been freed.
        head_bytes = 4 * s.embedding
        workspace = HEAD_BUFFER[c] + head_bytes - c * s.embedding
        if c == 2:
            workspace = max(workspace, head_bytes)
        return results, workspace

    def _update(self) -> tuple[float, float]:
        """Return (activations, head) at the moment of an update when their sum is largest."""
        s = self.shape
        c = self.c
        T = self.T
        sharded = self.N > 1
        mode = self.config.model.checkpointing
        offloaded = self.config.model.offload_activations

        saved = self._layer_saved()
        kept = 0 if offloaded else self._kept()
        # The backward pass of one layer needs what it recomputes or fetches, and two gradients of
        # the MLP.
        one_layer = saved * ((mode != "none") + offloaded) + 2 * c * s.active * s.intermediate * T
        last_norm = (4 + 2 * c) * s.hidden * T
        # Copies outlive a layer's forward pass if nothing is recomputed.
        lasting_copies = s.layers * self.copy if mode == "none" else 0
        copies = max(lasting_copies, self.copy)

        # Embedding and head are unsharded during a pass. A layer comes with the buffer that it
        # arrived in, or with the next layer.
        gathered_rest = c * s.rest if sharded else 0
        gathered_layer = 2 * c * s.layer if sharded else 0
        reduced_layer = 4 * s.layer if sharded and not self.lora.rank else 0
        reduced_rest = 4 * s.rest if sharded else 0

        results, workspace = self._head()
        cast_head = c * s.embedding if self.casts else 0
        head_gradient = 0 if self.lora.rank else (c if sharded else self.w) * s.embedding
        # dW waits for the embedding's gradient if they are tied, and for its reduction if sharded.
        waiting_gradient = head_gradient if s.tied or sharded else 0
        tied_gradients = 2 * head_gradient if s.tied else 0  # dE beside dW, and their sum

        last_forward = (kept + copies + gathered_layer + gathered_rest + saved, 0)
        head = (
            kept + last_norm + lasting_copies + gathered_rest,
            cast_head + c * s.hidden * T + results + workspace,
        )
        layer_backward = (
            kept + one_layer + copies + gathered_rest + gathered_layer + reduced_layer,
            waiting_gradient,
        )
        # Gradients are float32 on the way to other ranks.
        end_of_backward = (0, head_gradient + tied_gradients + reduced_rest)
        return max(last_forward, head, layer_backward, end_of_backward, key=sum)

    def _phases(self) -> dict[str, dict[str, float]]:
        s = self.shape
        optim = self.config.optim
        offloaded_reference = self.config.policy.offload_reference
        several = self.N > 1

        adapters = 4 * self.trained_parameters if self.lora.rank else 0
        weights = {
            "weights": (self.weight_bytes + adapters) / self.shards,
            "critic": self.critic,
            "optimizer": 0 if optim.offload else self.optimizer,
        }
        resident = weights | {"reference": 0 if offloaded_reference else self.reference}
        training = resident | {"gradients": self._gradients()}
        # On one GPU an offloaded reference is moved to the card. On several GPUs it comes layer by
        # layer.
        comes_by_layer = offloaded_reference and several
        scoring = weights | {"reference": 0 if comes_by_layer else self.reference}

        awake = {
            "engine": self.engine.weights,
            "KV cache": self.engine.cache,
            "overhead": OVERHEAD,
        }
        asleep = {"engine": self.engine.asleep, "overhead": OVERHEAD}

        gathered = self.c * (s.rest + 2 * s.layer) if several else 0
        forward = self._layer_saved() + self.copy + gathered
        activations, head = self._update()
        # In the step, an offloaded state is on the card for one parameter at a time.
        largest = max(s.embedding, 2 * s.experts * s.intermediate * s.hidden)
        step = self.state * largest / self.shards if optim.offload else 0

        phases = {
            "rollout": resident | awake,
            "score": scoring | {"activations": forward} | asleep,
            "update": training | {"activations": activations, "head": head} | asleep,
            "step": training | {"step": step} | asleep,
        }
        if self.engine.own_card:
            engine, cache = self.engine.own_card
            phases["server"] = {"engine": engine, "KV cache": cache, "overhead": OVERHEAD}
        return phases

    def _host(self) -> dict[str, dict[str, float]]:
        """Return components of rank 0's host, for all n ranks there together.

        Rank 0 loads the full model, and gathers it at the end to export it.
        """
        config = self.config
        n = self.on_host
        several = self.N > 1
        offloads_reference = config.policy.offload_reference
        copies_reference = several or offloads_reference

        processes = {"processes": HOST_PROCESS * n}
        offloaded_reference = self.reference * n * (PINNED if several else 1)
        resident = processes | {
            "optimizer": (self.optimizer + SLAB) * n if config.optim.offload else 0,
            "reference": offloaded_reference if offloads_reference else 0,
            "engine": PINNED * self.engine.host * n,
        }
        activations = PINNED * self._kept() * n if config.model.offload_activations else 0
        loaded = {
            "weights": self.weight_bytes,
            "reference": self.reference * n if copies_reference else 0,
            "critic": self.critic * n if several else 0,
        }

        # A rank's weights and optimizer state are copied at once if half of the free memory holds
        # them. Otherwise they are copied in parts.
        free = (self.host_gib or 0) * GIB - sum(resident.values())
        self.copied = n * self.saved <= free / 2
        part = min(CHECKPOINT_PART, self.saved) + self.c * self.shape.embedding / self.shards
        return {
            "load": processes | loaded,
            "update": resident | {"activations": activations},
            "save": resident | {"checkpoint": n * (self.saved if self.copied else part)},
            "export": processes | {"weights": self.weight_bytes},
        }


def _in_gib(phases: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Convert bytes to GiB, leaving out components of size zero."""
    sizes = {}
    for phase, parts in phases.items():
        sizes[phase] = {part: part_bytes / GIB for part, part_bytes in parts.items() if part_bytes}
    return sizes


def _largest_sum(phases: dict[str, dict[str, float]]) -> float:
    return max(sum(parts.values()) for parts in phases.values())
