"""One run's configuration as pydantic models: a section, a table of the recipe (`paw.recipe` reads those). No torch.

`env`, `engine`, `advantage` and `agent` name a plug-in (`paw.plugins`), whose settings are keys of the
section too. A key with `Only` applies beside some values of another key, and is unknown beside the
rest.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from paw.errors import UserError
from paw.keys import flatten, keys_of, section_type
from paw.tool_config import (
    EndpointConfig,
    EngineConfig,
    RwmlConfig,
    SftConfig,
    TrackingConfig,
    WarmupConfig,
    listed,
)
from paw.values import (
    Count,
    Natural,
    NonNegative,
    Only,
    PluginSection,
    Positive,
    Rate,
    Seconds,
    Section,
    Seed,
    Share,
)

WM, CMAE, GCE = Only("wm.enabled", (True,)), Only("wm.loss", ("cmae",)), Only("wm.loss", ("gce",))
FLASH, LORA = Only("optim.name", ("flash-adamw",)), Only("lora.rank")
_DEFAULT: Any = {}  # validated like a table: a plug-in's section has the plug-in's type


class RunConfig(Section):
    name: Annotated[str, Field(min_length=1)] = "run"
    """Name of the run's folder. By default the recipe's name, numbered."""
    dir: Path = Path("runs")
    """Parent folder: the run lives in dir/name."""
    seed: Seed = 0
    """Seed of tasks, sampling and mini-batches."""
    updates: Count = 150
    """Updates (training steps) of the run."""
    threads: Natural = 0
    """CPU threads of torch, and of vLLM, in each rank; 0 takes OMP_NUM_THREADS, or an equal share of the cores."""
    save_every: Natural = 50
    """Updates between checkpoints; 0 saves only at the end."""
    keep: Count = 2
    """Number of checkpoints kept."""
    max_skipped: Count = 3
    """Optimizer steps in a row with non-finite gradients before the run stops."""
    peer_timeout_s: Annotated[float, Field(ge=5.0, le=1e7)] = 600.0
    """Several ranks: seconds that one may be silent, or a phase may take beyond the longest seen, before all end."""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    """Experiment trackers that get the metrics: one name or a list."""
    callbacks: list[str] = []
    """Callbacks of your own, "module:name" or "FILE.py:name" (docs/python.md)."""

    _one_or_more = field_validator("trackers", "callbacks", mode="before")(listed)

    @field_validator("name")
    @classmethod
    def _stays_in_dir(cls, name: str) -> str:
        if "/" in name or name in (".", "..") or not name.isprintable() or len(name.encode()) > 200:
            raise ValueError(
                "a folder's name of at most 200 bytes, without '/' and line ends; run.dir says where"
            )
        return name


class ModelConfig(Section):
    path: str
    """Hugging Face name or folder, or "quickstart": a small Qwen3 made on the spot (see `warmup`)."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Variables of the chat template, such as {enable_thinking = false}."""
    tool_parser: Annotated[str, Field(min_length=1)] = "auto"
    """What reads calls of tools: a parser of vLLM ("hermes", "llama3_json"), "transformers", or auto, which tries."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass; auto: bfloat16 on a GPU or a CPU with instructions for it,
    else float32. Gradients are accumulated in what the optimizer stores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto takes a GPU where there is one."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations recomputed backwards: none, all but the outputs of attention and half the matrix products, all."""
    offload_activations: bool = False
    """Keep activations in host memory until the backward pass."""
    attention: Literal["auto", "flash", "varlen", "sdpa"] = "auto"
    """Attention over packed sequences (sdpa pads them); auto takes the first that runs.

    All give equal log-probs.
    """
    compile: bool = False
    """torch.compile of every decoder layer."""
    shard: Literal["world", "node", "none"] = "world"
    """Several ranks: divide weights, gradients and moments among all; within a machine, with a copy on each; or not."""
    liger: bool = False
    """Liger's kernels for norms, rotary embedding and SwiGLU (the vocabulary head is always PaW's)."""
    head_backend: Literal["auto", "triton", "cuda", "cpu", "torch"] = "auto"
    """Implementation of the vocabulary head; auto is the fastest that runs on the device (`paw doctor` names it)."""


class LoraConfig(Section):
    """Train low-rank adapters instead of the weights; the export has the merged weights."""

    rank: Natural = 0
    """Rank of the adapters; 0 trains every weight."""
    alpha: Annotated[Positive, LORA] = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: Annotated[list[str], LORA] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Names of the linear layers that get adapters."""
    send: Annotated[
        Literal["adapters", "merged"], LORA, Only("engine.type", ("vllm", "server"))
    ] = "adapters"
    """What vLLM gets after each update: adapters alone, beside the base weights that it has, or merged weights."""


class EnvConfig(PluginSection):
    """Keys of every environment; each has its own beside them (docs/environments.md)."""

    KIND, KEY = "envs", "name"
    name: str = "alfworld"
    """A built-in environment, one that a package registers, "module:Class" or "FILE.py:Class"."""
    train_split: str = "train"
    """Split to train on."""
    eval_split: str = "valid_unseen"
    """Split to evaluate on."""
    max_turns: Count = 50
    """Turns of an episode at most."""
    reward: Positive = 10.0
    """Reward for winning, R_max; an environment of your own says its largest return as `reward_max`."""
    invalid_penalty: NonNegative = 0.1
    """Subtracted from the score of a turn whose response is no valid action."""
    step_timeout_s: Seconds = 60.0
    """Seconds before a turn of an environment that blocks counts as hung, which costs its episode;
    also how long an agent may wait for anything but model and environment."""
    processes: Annotated[int, Field(ge=0, le=1000)] = 0
    """Processes of each rank in which environments of your own run, those of gymnasium and
    verifiers, and questions with a score of your own: one that dies, or hangs for
    env.step_timeout_s, costs its episodes and is replaced. 0 runs them in threads of the
    trainer."""
    max_text: Count = 1_000_000
    """Characters kept of a prompt (its last), of an observation or an anchor (their first)."""


class AgentConfig(PluginSection):
    """How the model plays an episode."""

    KIND, KEY = "agents", "type"
    type: str = "plain"
    """plain, react, reflexion, search-r1, zerosearch, or an agent of your own (docs/agents.md)."""


class RewardConfig(PluginSection):
    """What an episode is worth."""

    KIND, KEY, NONE = "rewards", "type", "env"
    type: str = "env"
    """The environment's own, or "FILE.py:name" or "module:name": a function over a trajectory (docs/agents.md)."""


class RolloutConfig(Section):
    tasks: Count = 16
    """Tasks (groups) of one update."""
    group_size: Count = 8
    """Episodes of each task."""
    refill: Natural = 0
    """Times `tasks`: further ones at most that take the place of groups whose returns are all equal (DAPO)."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    ahead: Annotated[Natural, Only("engine.type", ("server",))] = 0
    """Updates whose episodes are played ahead, while the trainer works; no token is of weights older than that."""
    max_prompt_tokens: Count = 2048
    """Longer prompts lose their beginning."""
    max_response_tokens: Count = 512
    """Tokens of a response at most."""


class AdvantageConfig(PluginSection):
    """The advantage estimator; its own keys are those of its function in paw/algo/advantages.py."""

    KIND, KEY = "advantages", "type"
    type: str = "grpo"
    """grpo, rloo, gigpo, ppo (its baseline is a critic, see `critic`), or an estimator of your own."""
    penalty_only: Annotated[Literal["keep", "drop"], Only("advantage.type", excluded=("ppo",))] = (
        "keep"
    )
    """drop: groups whose returns are all equal get no advantage, instead of blowing up their penalties."""


class CriticConfig(Section):
    """PPO's critic: the start model with a scalar head."""

    ONLY: ClassVar = Only("advantage.type", ("ppo",))
    lr: Rate = 1e-5
    """Learning rate."""
    value_clip: Positive = 0.5
    """A value may move this far from the one the advantages were computed from."""


class PolicyConfig(PluginSection):
    KIND, KEY, WITHIN = "losses", "loss", ("ppo",)
    loss: str = "ppo"
    """Loss of responses: ppo, cispo, gspo (with the gradient of GSPO-token), or one of your own,
    "module:name" or "FILE.py:name" (docs/algorithm.md)."""
    clip_low: Share = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: NonNegative = 0.2
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[float, Field(gt=1.0), Only("policy.loss", ("ppo",))] = 3.0
    """With a negative advantage the loss is at most this times its size."""
    kl_coef: NonNegative = 0.01
    """Weight of the KL term to the start model; 0 needs no reference model."""
    entropy_coef: NonNegative = 0.001
    """Weight of the entropy bonus."""
    loss_norm: Literal["token", "sample", "group", "verl"] = "token"
    """Mean over the mini-batch's response tokens, over token means of samples or groups (Eq. (11)), or as in verl."""
    verl_samples: Annotated[Count, Only("policy.loss_norm", ("verl",))] = 32
    """Samples of the micro-batches whose means are averaged (packing stays as it is)."""
    old_logp: Literal["trainer", "engine"] = "trainer"
    """engine takes the sampler's log-probs and saves the log-prob pass where nothing else needs it."""
    tis_cap: Annotated[float, Field(gt=1.0)] | None = None
    """Truncated importance sampling: tokens are weighted by min(pi_old / pi_sampler, cap); with
    old_logp = "engine" min(pi / pi_sampler, cap) takes the place of PPO's clipped ratio."""
    is_mask: tuple[Positive, Positive] | None = None
    """Tokens whose pi_old / pi_sampler is not within [low, high] have no policy loss."""
    is_level: Literal["token", "response"] = "token"
    """For tis_cap and is_mask: the ratio of each token, or the geometric mean over its response."""
    offload_reference: Annotated[bool, Only("policy.kl_coef"), Only("lora.rank", (0,))] = False
    """Keep the reference model in host memory but for its log-prob pass."""


class WorldConfig(PluginSection):
    """World-model co-training (PaW Section 3)."""

    KIND, KEY, WITHIN = "losses", "loss", ("cmae", "mae", "ce", "gce")
    enabled: bool = True
    """Whether observations are predicted too."""
    alpha: Annotated[Rate, WM] = 0.75
    """Share of the update's transitions kept, those of highest action entropy."""
    loss: Annotated[str, WM] = "cmae"
    """Per observation token of probability p: cmae [p <= rho] (1 - p), mae 1 - p, ce -log p, gce (1
    - p^q) / q (arXiv 1805.07836), or a loss of your own."""
    rho: Annotated[Rate, WM, CMAE] = 0.2
    """Tokens of a higher probability are left out."""
    q: Annotated[Rate, WM, GCE] = 0.7
    """Exponent."""
    weight: Annotated[Literal["adaptive"] | NonNegative, WM] = "adaptive"
    """lambda_g: adaptive (1 - mean return / R_max, clamped to [0, 1]) or a constant."""
    entropy: Annotated[Literal["full", "sampled"], WM] = "full"
    """Action entropy over the whole vocabulary, or the mean of -p log p of the sampled tokens."""
    scale: Annotated[NonNegative, WM] = 1.0
    """Extra factor on the world-model term; the paper's is 1."""
    dedup: Annotated[bool, WM] = False
    """Predict identical (prompt, response, observation) samples of an update once."""
    max_tokens: Count = 512
    """Tokens of an observation predicted at most, in training and in the report's examples."""


class OptimConfig(Section):
    name: Literal["adamw", "flash-adamw"] = "adamw"
    """adamw: fp32, 16 bytes a parameter with its gradient. flash-adamw: bf16 weights and 8-bit moments, 8.1 bytes."""
    master_bits: Annotated[Literal[24, 32], FLASH] = 32
    """Bits of a weight. 24 are too few for an lr of 1e-6: a weight of 0.02 moves in steps of 4e-7."""
    offload: Annotated[bool, FLASH] = False
    """Optimizer state in host memory, on the device one parameter at a time during the step."""
    grad_sync: Literal["each", "last"] = "each"
    """Several ranks: reduce gradients after each micro-batch, or once, which keeps whole gradients until then."""
    lr: Rate = 1e-6
    """Learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Adam's betas."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    grad_clip: Positive = 1.0
    """Gradients are clipped to this norm."""
    warmup_updates: Natural = 0
    """Updates in which the learning rate rises to lr."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after that."""
    final_lr: Annotated[Share, Only("optim.schedule", ("cosine",))] = 0.1
    """Share of lr left at the end."""
    epochs: Count = 1
    """Passes over the samples of an update."""
    minibatch_samples: Count = 256
    """Samples (turns) of one optimizer step."""
    micro_batch_tokens: Count = 16384
    """Tokens of one forward and backward pass."""


class EvalConfig(Section):
    every: Natural = 5
    """Updates between evaluations; 0 evaluates only at the start and the end."""
    games: Natural = 128
    """Seeded draws of the split; 0 plays the whole split."""
    temperature: NonNegative = 0.4
    """Sampling temperature; 0 is greedy."""
    seed: Seed = 1000
    """Seed of the draws and of sampling."""


class Config(Section):
    """A whole configuration.

    Raises pydantic's ValidationError for keys and values that do not go.
    """

    run: RunConfig = RunConfig()
    tracking: TrackingConfig = TrackingConfig()
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    warmup: WarmupConfig = WarmupConfig()
    env: SerializeAsAny[EnvConfig] = _DEFAULT
    agent: SerializeAsAny[AgentConfig] = _DEFAULT
    reward: SerializeAsAny[RewardConfig] = _DEFAULT
    endpoint: EndpointConfig = EndpointConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: SerializeAsAny[EngineConfig] = _DEFAULT
    advantage: SerializeAsAny[AdvantageConfig] = _DEFAULT
    critic: CriticConfig = CriticConfig()
    policy: SerializeAsAny[PolicyConfig] = _DEFAULT
    wm: SerializeAsAny[WorldConfig] = _DEFAULT
    optim: OptimConfig = OptimConfig()
    sft: SftConfig = SftConfig()
    rwml: RwmlConfig = RwmlConfig()
    eval: EvalConfig = EvalConfig()

    @field_validator("env", "agent", "reward", "engine", "advantage", "policy", "wm", mode="before")
    @classmethod
    def _with_plugin(cls, table: Any, info: ValidationInfo) -> Any:
        if not isinstance(table, dict):
            return table
        base: Any = cls.model_fields[str(info.field_name)].annotation
        try:
            return section_type(base, table.get(base.KEY)).model_validate(table)
        except UserError as error:
            name = table.get(base.KEY, base.model_fields[base.KEY].default)
            raise _problem(
                "plugin", str(error).removeprefix(f"'{name}': "), (base.KEY,), name
            ) from None

    @model_validator(mode="before")
    @classmethod
    def _applies(cls, tree: Any) -> Any:
        flat = flatten(tree) if isinstance(tree, dict) else {}
        for key, known in keys_of(cls, flat).items():
            if known.needs and flat.get(key, known.field.default) != known.field.default:
                raise _problem("only", f"it needs {known.needs}", tuple(key.split(".")), flat[key])
        return tree

    @model_validator(mode="after")
    def _check(self) -> "Config":
        kind, flash = self.advantage.type, self.optim.name == "flash-adamw"
        if self.rollout.group_size == 1 and kind != "ppo":
            instead = "use 2 or more, or advantage.type = 'ppo'"
            raise ValueError(f"rollout.group_size = 1 leaves {kind} without a baseline; {instead}")
        if self.engine.type == "server" and bool(self.engine.urls) == bool(self.engine.servers):
            raise ValueError(
                "engine.type = 'server' needs either engine.urls = 'http://...' or engine.servers = 1"
            )
        if self.policy.is_mask and not self.policy.is_mask[0] < self.policy.is_mask[1]:
            raise ValueError(
                f"policy.is_mask = {list(self.policy.is_mask)} is [low, high] with low < high"
            )
        from_engine, weighs = (
            self.policy.old_logp == "engine",
            self.policy.tis_cap or self.policy.is_mask,
        )
        if self.policy.is_level == "response" and not weighs:
            raise ValueError(
                "policy.is_level says what policy.tis_cap and policy.is_mask look at: set one of them"
            )
        if from_engine and (self.policy.is_mask or self.policy.is_level == "response"):
            raise ValueError("policy.is_mask and policy.is_level need policy.old_logp = 'trainer'")
        if from_engine and self.policy.tis_cap and self.policy.loss in ("cispo", "gspo"):
            raise ValueError(
                f"policy.tis_cap and policy.loss = '{self.policy.loss}' need policy.old_logp = 'trainer'"
            )
        if self.lora.rank and kind == "ppo":
            raise ValueError(
                "lora.rank with advantage.type = 'ppo': the critic trains every weight, use lora.rank = 0"
            )
        if self.env.name == "next_state" and self.wm.enabled:
            raise ValueError(
                "env.name = 'next_state' learns the world model by RL: set wm.enabled = false"
            )
        if flash and self.lora.rank:
            raise ValueError("lora.rank trains fp32 adapters: take optim.name = 'adamw'")
        if flash and self.model.dtype == "float32":
            raise ValueError(
                "optim.name = 'flash-adamw' keeps bf16 weights: it needs model.dtype = 'bfloat16'"
            )
        return self


def _problem(kind: str, why: str, where: tuple[str, ...], value: Any) -> ValidationError:
    problem = PydanticCustomError(kind, "{why}", {"why": why})  # type: ignore[arg-type]
    return ValidationError.from_exception_data(
        kind, [InitErrorDetails(type=problem, loc=where, input=value)]
    )
