"""The memory that a configuration needs, by arithmetic: of a GPU, of a server's, of a host. Loads no torch.

Of one GPU of N, or of one host; T tokens of a micro-batch; `c` bytes an element in the forward pass, `w` of a stored
weight. All formulas are upper ends: gradients of an earlier micro-batch are there, every token is a target.
`bench/memory.py` holds update and step against simulated ones (docs/memory.md). The rest is stated assumption.
"""

from paw.config import Config
from paw.errors import UserError
from paw.tools.shapes import Shape

GIB = 2**30
USABLE = 0.95  # share of a GPU's memory to plan with: 76 of 80
OVERHEAD = 1.5 * GIB  # CUDA context, library workspaces, what the allocator loses to fragments
ENGINE_WORK = 2.0 * GIB  # of vLLM's share: its activations and CUDA graphs; the rest holds weights and KV cache
ENGINE_ASLEEP = 1.0 * GIB  # what a sleeping vLLM leaves on the card
ENGINE_ROWS = 8  # sequences of full length that the KV cache should at least hold
HOST_PROCESS = 6.0 * GIB  # one trainer process with torch, CUDA and vLLM loaded
PINNED = 2.0  # torch rounds a page-locked tensor up to a power of two; the optimizer's state goes around that
SLAB = 2.0 * GIB  # granularity of the optimizer's state in host memory (paw.model.host)
CHECKPOINT_PART = 4.0 * GIB  # what a rank has in host memory to write a file of a checkpoint (paw.state.checkpoint)
HEAD_BUFFER = {2: 1440 << 20, 4: 1536 << 20}
"""Chunk of the fused head by bytes of an element: Triton's e and statistics, or plain torch's three float32 buffers."""
FLASH_MOMENTS = 2 + 2 * 2 / 32
"""flash-adamw: two 8-bit moments with a 16-bit scale for every 32; the further bits of the weight come to that."""
PLAIN_STATE = 12
"""flash-adamw: bytes of a norm's or bias's parameter, its weight and moments in float32."""


class Memory:
    """Predicts memory, in GiB, of `config` on `gpus` cards of `gpu_gib`, on `hosts` machines. Servers that the run
    starts have their cards among those; UserError where they leave none. Those of engine.urls have others."""

    def __init__(
        self, config: Config, shape: Shape, *, gpus: int, gpu_gib: float, host_gib: float | None = None, hosts: int = 1
    ) -> None:
        self.config, self.shape, self.gpu_gib, self.host_gib = config, shape, gpu_gib, host_gib
        self.gpus, self.hosts, self.N = gpus, hosts, gpus - config.engine.gpus
        if self.N < 1:
            raise UserError(f"{gpus} GPUs: engine.servers take {config.engine.gpus}, none is left to train on")
        self.on_host = min(self.N, -(-gpus // hosts))
        self.shards = {"none": 1, "node": self.on_host, "world": self.N}[config.model.shard]
        self.lora, self.T = config.lora, config.optim.micro_batch_tokens
        self.vllm, flash = config.engine.type == "vllm", config.optim.name == "flash-adamw"
        self.c = 4 if config.model.dtype == "float32" else 2  # "auto" is bfloat16 on a card
        self.served = config.engine.type == "server"
        self.engines = (config.engine.servers or len(config.engine.urls)) if self.served else self.N
        self.least = self._least_tensor_parallel() if self.served else 1
        """GPUs that a server needs at least, a power of two, for weights and ENGINE_ROWS sequences; 0: none will do."""
        self.tensor_parallel = config.engine.tensor_parallel if config.engine.servers else max(1, self.least)
        """GPUs of an engine; of engine.urls, which do not say, as many as they need at least."""
        # flash-adamw and LoRA store weights as the forward pass reads them, adamw in float32.
        self.w = self.c if flash or self.lora.rank else 4
        # One GPU and float32 weights: a layer has `c`-byte copies while it runs. With several FSDP's gathering makes
        # them.
        self.casts = self.w != self.c and self.N == 1
        self.copy = self.c * shape.layer if self.casts else 0
        self.trained, self.whole = shape.parameters, self.w * shape.parameters
        if self.lora.rank:
            sizes = [sum(shape.linears[name]) for name in self.lora.targets if name in shape.linears]
            self.trained = self.lora.rank * sum(sizes) * shape.layers
        self.state = (config.optim.master_bits - 16) / 8 + FLASH_MOMENTS if flash else 8  # of one parameter
        # PPO's critic has a head of one row. Its step comes first and needs no more than the policy's.
        self.valued = 0
        if config.advantage.type == "ppo":
            self.valued = shape.parameters - (0 if shape.tied else shape.embedding) + shape.hidden + 1
        self.critic = self.w * self.valued / self.shards
        plain = ((PLAIN_STATE - self.state) * shape.vectors * (1 + (self.valued > 0))) if flash else 0
        self.optimizer = (self.state * (self.trained + self.valued) + plain) / self.shards
        self.stored = (4 if self.lora.rank else self.w) * (self.trained + self.valued)
        self.saved = self.stored / self.shards + self.optimizer
        """What a rank has of weights and optimizer state, and writes into a checkpoint."""
        # With LoRA the reference is the policy without its adapters.
        self.reference = self.whole / self.shards if config.policy.kl_coef and not self.lora.rank else 0
        self.phases, self.host = (
            {name: {part: size / GIB for part, size in parts.items() if size} for name, parts in sizes.items()}
            for sizes in (self._phases(), self._host())
        )
        """Components of each phase, of one GPU: rollout, score, update, step, and of a server's; of the first host, all
        its ranks: load, update, save, export."""
        self.peak, self.host_total = (
            max(sum(of.values()) for of in sizes.values()) for sizes in (self.phases, self.host)
        )

    @property
    def kv_tokens(self) -> float:
        """Tokens that an engine's KV cache holds, of the ENGINE_ROWS sequences it should; infinite without vLLM."""
        if self.served:
            return self._server_tokens(self.tensor_parallel)
        return self._engine()["KV cache"] / self.shape.kv_bytes if self.vllm else float("inf")

    def kv_needed(self, rows: int = ENGINE_ROWS) -> int:
        """Tokens of `rows` sequences of full length."""
        return rows * (self.config.rollout.max_prompt_tokens + self.config.rollout.max_response_tokens)

    def _vllm_card(self, size: int) -> dict[str, float]:
        """Of each of a vLLM's `size` cards: tensor parallel divides the weights, the embedding's too."""
        taken = self.c * self.shape.parameters / size + ENGINE_WORK
        share = self.config.engine.memory_share * self.gpu_gib * GIB
        return {"engine": taken, "KV cache": max(0.0, share - taken)}

    def _server_tokens(self, size: int) -> float:
        """Tokens in a server's KV cache: each card has its share of the heads, one at least (vLLM repeats them)."""
        return self._vllm_card(size)["KV cache"] / self.shape.kv_bytes * min(size, self.shape.kv_heads)

    def _least_tensor_parallel(self) -> int:
        sizes = (2**power for power in range(7) if self.shape.heads % 2**power == 0)
        return next((size for size in sizes if self._server_tokens(size) >= self.kv_needed()), 0)

    # --- the formulas, in bytes ---------------------------------------------------------------------------------------

    def _gradients(self) -> float:
        """In the dtype of what is trained; float32 adapters. With grad_sync "last" whole float32 sums, unsharded."""
        if self.N > 1 and self.config.optim.grad_sync == "last":
            return 4 * self.trained
        return (4 if self.lora.rank else self.w) * self.trained / self.shards

    def _layer_saved(self) -> int:
        """What one decoder layer keeps for its backward pass."""
        s, c = self.shape, self.c
        D, Q, K, F = s.hidden, s.queries, s.keys, s.intermediate
        # Each norm: its float32 input, x / rms, and its output as the linear layers read it.
        scaled = 0 if self.lora.rank else c  # only a norm that is trained needs x / rms
        norms = 2 * (4 + scaled + c) * D
        head_norms = (4 + c) * (Q + K) if s.qk_norm else 0
        attention = c * (Q + 2 * K) + c * Q + 4 * s.heads  # q, k, v; the output and its log-sum-exp
        mlp = 4 * c * s.active * F  # gate, silu(gate), up, their product
        if s.experts:
            mlp += 2 * c * s.active * D  # a token's copy for each of its experts, and what they answer
        adapters = c * self.lora.rank * len(self.lora.targets)  # what each A makes of the input that is kept anyway
        return (norms + head_norms + attention + mlp + adapters) * self.T

    def _kept(self) -> int:
        """Activations kept from forward to backward, all layers."""
        s, c, mode = self.shape, self.c, self.config.model.checkpointing
        if mode == "none":
            return s.layers * self._layer_saved()
        # selective: the outputs of q, v, gate and down (every second product) and of attention.
        products = c * (2 * s.queries + s.keys + s.active * s.intermediate + s.hidden) + 4 * s.heads
        return s.layers * (c * s.hidden + (products if mode == "selective" else 0)) * self.T

    def _head(self) -> tuple[float, float]:
        """The fused head in the forward pass beside hidden states: (its results dL/dh and dW, its workspace)."""
        s, c = self.shape, self.c
        results = c * (s.hidden * self.T + s.embedding)
        row = c * (s.vocabulary + 3 * s.hidden) + 16 * s.vocabulary / 256 if c == 2 else 12 * s.vocabulary
        if row * self.T <= HEAD_BUFFER[c]:
            return results, row * self.T
        # Several chunks: dW is summed in float32 and rounded when the buffer is gone.
        total = 4 * s.embedding
        return results, max(HEAD_BUFFER[c] + total - c * s.embedding, total if c == 2 else 0)

    def _update(self) -> tuple[float, float]:
        """(activations, head) at the moment of a forward and backward pass at which their sum is largest."""
        s, c, T, sharded, mode = self.shape, self.c, self.T, self.N > 1, self.config.model.checkpointing
        offloaded, saved = self.config.model.offload_activations, self._layer_saved()
        kept = 0 if offloaded else self._kept()
        # The backward pass of one layer: what it recomputes or fetches, and two gradients of the MLP.
        one = saved * ((mode != "none") + offloaded) + 2 * c * s.active * s.intermediate * T
        tail = (4 + 2 * c) * s.hidden * T  # of the last norm
        gathered = c * s.rest if sharded else 0  # embedding and head, whole during a pass
        lasting = s.layers * self.copy if mode == "none" else 0  # only then copies outlive a layer's forward pass
        results, workspace = self._head()
        head_g = 0 if self.lora.rank else (c if sharded else self.w) * s.embedding
        per_layer = 2 * c * s.layer if sharded else 0  # gathered, and the buffer it came in, or the next one
        reduced = 4 * s.layer if sharded and not self.lora.rank else 0
        cast_head = c * s.embedding if self.casts else 0
        return max(
            (kept + max(lasting, self.copy) + per_layer + gathered + saved, 0),  # the last layer's forward
            (kept + tail + lasting + gathered, cast_head + c * s.hidden * T + results + workspace),
            # dW waits for the embedding's gradient where they are tied, and for its reduction where sharded.
            (kept + one + max(lasting, self.copy) + gathered + per_layer + reduced, head_g if s.tied or sharded else 0),
            # The end of the backward pass: dE beside dW, their sum, and float32 on the way to other ranks.
            (0, head_g + (2 * head_g if s.tied else 0) + (4 * s.rest if sharded else 0)),
            key=sum,
        )

    def _engine(self) -> dict[str, float]:
        """Awake, on one of the trainer's cards: its weights and KV cache. `transformers` alone on the card plays on the
        policy's, servers have cards of their own."""
        rollout, s = self.config.rollout, self.shape
        if self.vllm:
            return self._vllm_card(1)
        if self.served:
            return {"engine": 0.0, "KV cache": 0.0}
        longer = 1 + rollout.max_response_tokens / rollout.max_prompt_tokens
        cache = s.kv_bytes * self.c / 2 * self.config.engine.max_batch_tokens * longer
        return {"engine": self.c * s.parameters if self.N > 1 or self.casts else 0, "KV cache": cache}

    def _phases(self) -> dict[str, dict[str, float]]:
        s, optim, offloaded = self.shape, self.config.optim, self.config.policy.offload_reference
        adapters = 4 * self.trained if self.lora.rank else 0
        optimizer = 0 if optim.offload else self.optimizer
        weights = {"weights": (self.whole + adapters) / self.shards, "critic": self.critic, "optimizer": optimizer}
        resident = weights | {"reference": 0 if offloaded else self.reference}
        training = resident | {"gradients": self._gradients()}
        awake = self._engine() | {"overhead": OVERHEAD}
        apart = awake["engine"] if self.N > 1 else 0  # with one GPU transformers plays on copies made for that
        asleep = {"engine": ENGINE_ASLEEP if self.vllm else apart, "overhead": OVERHEAD}
        # Alone, an offloaded reference visits the card; with several it comes layer by layer.
        scoring = weights | {"reference": 0 if offloaded and self.N > 1 else self.reference}
        forward = self._layer_saved() + self.copy + (self.c * (s.rest + 2 * s.layer) if self.N > 1 else 0)
        activations, head = self._update()
        # The step: the state of one parameter at a time, where it is offloaded.
        largest = max(s.embedding, 2 * s.experts * s.intermediate * s.hidden)
        step = self.state * largest / self.shards if optim.offload else 0
        server = {"server": self._vllm_card(self.tensor_parallel) | {"overhead": OVERHEAD}} if self.served else {}
        return {
            "rollout": resident | awake,
            "score": scoring | {"activations": forward} | asleep,
            "update": training | {"activations": activations, "head": head} | asleep,
            "step": training | {"step": step} | asleep,
        } | server

    def _host(self) -> dict[str, dict[str, float]]:
        """Of rank 0's host, its n ranks. Rank 0 loads the whole model, and gathers it in the end to export it."""
        config, s, n, several = self.config, self.shape, self.on_host, self.N > 1
        offloads = config.policy.offload_reference
        sleeping = self.vllm and config.engine.sleep_level == 1
        activations = PINNED * self._kept() * n if config.model.offload_activations else 0
        processes = {"processes": HOST_PROCESS * n}
        resident = processes | {
            "optimizer": (self.optimizer + SLAB) * n if config.optim.offload else 0,
            "reference": self.reference * n * (PINNED if several else 1) if offloads else 0,
            "engine": PINNED * self.c * s.parameters * n if sleeping else 0,
        }
        loaded = {"weights": self.whole, "reference": self.reference * n if several or offloads else 0}
        loaded |= {"critic": self.critic * n if several else 0}
        # A rank's weights and optimizer state are copied where half of the room holds them; else a part at a time.
        room = (self.host_gib or 0) * GIB - sum(resident.values())
        self.copied = n * self.saved <= room / 2
        part = min(CHECKPOINT_PART, self.saved) + self.c * s.embedding / self.shards
        return {
            "load": processes | loaded,
            "update": resident | {"activations": activations},
            "save": resident | {"checkpoint": n * (self.saved if self.copied else part)},
            "export": processes | {"weights": self.whole},
        }
