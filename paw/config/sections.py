"""The configuration of a run, as one pydantic model per section. A section is a table of a recipe.

Some sections, such as `env`, `engine` and `advantage`, name a plug-in (`paw.config.plugins`). Its
settings are then keys of the section too. A key with `Only` applies only with some values of
another key; with other values it is an unknown key. `paw.config.recipe` reads recipes. This module
imports no torch.
"""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paw.config import plugins
from paw.config.entries import Entry, problem
from paw.config.keys import OnlyPlugins, Unlisted, flatten, keys_of, section_type
from paw.config.tool_sections import (
    EndpointConfig,
    RwmlConfig,
    SftConfig,
    TrackingConfig,
    WarmupConfig,
)
from paw.config.traits import Anchors, EstimatorTraits, Need, traits_of
from paw.config.values import (
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
    listed,
)
from paw.errors import UserError


def estimator_traits(name: Any) -> EstimatorTraits:
    """Return the traits of the advantage estimator of that name; the defaults if there is none."""
    if isinstance(name, str):
        with suppress(UserError):  # reported when the section itself is validated
            return traits_of(plugins.load("advantages", name))
    return EstimatorTraits()


@dataclass(frozen=True)
class OnlyEstimators(Only):
    """Metadata of a key that applies only with advantage estimators that need something."""

    key: str = "advantage.type"
    needs: Need = "groups"

    def __str__(self) -> str:
        """Name the built-in estimators that need it, or those that do not if they are fewer."""
        having = [name for name in plugins.BUILT_IN["advantages"] if self.holds(name)]
        lacking = [name for name in plugins.BUILT_IN["advantages"] if not self.holds(name)]
        if len(lacking) < len(having):
            return str(Only(self.key, excluded=tuple(lacking)))
        return str(Only(self.key, tuple(having)))

    def holds(self, value: Any) -> bool:
        return estimator_traits(value).needs == self.needs


@dataclass(frozen=True)
class SettingOfPpo(Only):
    """Metadata of a setting of `ppo` in the section itself.

    A loss with a parameter of that name brings the key with a default of its own, so this key
    applies only with ppo.
    """

    key: str = "policy.loss"
    values: tuple[str, ...] = ("ppo",)
    setting: str = ""

    def __str__(self) -> str:
        """Name the built-in losses that have the setting. Imports torch."""
        having = []
        for name in plugins.POLICY_LOSSES:
            parameters = inspect.signature(plugins.load("losses", name)).parameters
            if self.setting in parameters:
                having.append(name)
        return str(Only(self.key, tuple(having)))


WM = Only("wm.enabled", (True,))
CMAE = Only("wm.loss", ("cmae",))
GCE = Only("wm.loss", ("gce",))
FLASH = Only("optim.name", ("flash-adamw",))
LORA = Only("lora.rank")
GROUPS = OnlyEstimators(needs="groups")
CRITIC = OnlyEstimators(needs="critic")
_DEFAULT: Any = {}
"""Default of a section with a plug-in.

It is validated like a table, so it gets the plug-in's type.
"""


class RunConfig(Section):
    name: Annotated[str, Field(min_length=1)] = "run"
    """Name of the run's folder. The default is the recipe's name, with a number from the second run
    on."""
    dir: Path = Path("runs")
    """Parent folder. The run's files are in dir/name."""
    seed: Seed = 0
    """Seed of tasks, sampling and mini-batches."""
    updates: Count = 150
    """Updates (training steps) of the run."""
    threads: Natural = 0
    """CPU threads of torch, and of vLLM, in each rank. 0 uses OMP_NUM_THREADS or, if that is not
    set, an equal share of the cores."""
    save_every: Natural = 50
    """Updates between checkpoints; 0 saves only at the end."""
    keep: Count = 2
    """Number of checkpoints to keep."""
    log_episodes: Natural = 4
    """Number of training episodes written to episodes.jsonl after each update, from different tasks
    as far as possible. With several ranks, they are some that rank 0 has played. 0 writes none."""
    max_skipped: Count = 3
    """Consecutive optimizer steps with a non-finite loss or gradient after which the run stops."""
    peer_timeout_s: Annotated[float, Field(ge=5.0, le=1e7)] = 600.0
    """With several ranks: all ranks end if one is silent for this many seconds, or if a phase takes
    this much longer than the longest so far."""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    """Experiment trackers that receive the metrics: one name or a list."""
    callbacks: list[str] = []
    """Your own callbacks, "module:name" or "FILE.py:name" (docs/python.md)."""

    _one_or_more = field_validator("trackers", "callbacks", mode="before")(listed)

    @field_validator("name")
    @classmethod
    def _stays_in_dir(cls, name: str) -> str:
        if "/" in name or name in (".", "..") or not name.isprintable() or len(name.encode()) > 200:
            raise ValueError(
                "a folder's name of at most 200 bytes, without '/' and line breaks; "
                "run.dir is its parent folder"
            )
        return name


class ModelConfig(Section):
    path: str
    """Hugging Face name or folder, or "quickstart": a small Qwen3 that is created first (see
    `warmup`)."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Variables of the chat template, such as {enable_thinking = false}."""
    tool_parser: Annotated[str, Field(min_length=1)] = "auto"
    """Parser of tool calls: one of vLLM's ("hermes", "llama3_json"), "transformers", or auto, which
    finds one that can read the model's calls."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass. auto is bfloat16 on a GPU or on a CPU with instructions for
    it, otherwise float32. Gradients are accumulated in the dtype that the optimizer stores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto takes a GPU if there is one."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Which activations are recomputed in the backward pass. selective keeps the outputs of
    attention and of half the matrix products; full recomputes everything."""
    offload_activations: bool = False
    """Keep activations in host memory until the backward pass."""
    attention: Literal["auto", "flash", "varlen", "sdpa"] = "auto"
    """Attention over packed sequences (sdpa pads them). auto takes the first that works. All give
    the same log-probs."""
    compile: Literal["auto", True, False] = "auto"
    """Whether torch.compile compiles every decoder layer. auto compiles on a GPU if a trial at the
    start of the run gives the results and gradients of eager layers. It does not with selective
    checkpointing, which cannot choose operations inside compiled layers. true ends the run if the
    trial fails."""
    shard: Literal["world", "node", "none"] = "world"
    """How several ranks divide weights, gradients and moments. world divides them among all ranks.
    node divides them among the ranks of a machine, with a copy on each machine. none gives every
    rank everything."""
    liger: Literal["auto", True, False] = "auto"
    """Whether to use Liger's kernels for norms, rotary embedding and SwiGLU, after the same trial
    (the vocabulary head is always PaW's). auto uses them if model.compile = "auto" cannot
    compile."""
    head_backend: Literal["auto", "triton", "cuda", "cpu", "torch", "quack"] = "auto"
    """Implementation of the vocabulary head. auto takes the fastest that works on the device (`paw
    doctor` names it). quack is refused with the reason (docs/kernels.md)."""


class LoraConfig(Section):
    """Train low-rank adapters instead of the weights. The export has the merged weights."""

    rank: Natural = 0
    """Rank of the adapters; 0 trains every weight."""
    alpha: Annotated[Positive, LORA] = 32.0
    """Scale of the adapters, which is alpha / rank."""
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
        Literal["adapters", "merged"],
        LORA,
        OnlyPlugins("engine.type", kind="engines", ability="takes_adapters"),
    ] = "adapters"
    """What vLLM gets after each update: adapters, which it applies to its base weights, or merged
    weights."""


class EnvConfig(PluginSection):
    """Keys of every environment. Each has further keys of its own (docs/environments.md)."""

    KIND = "envs"
    KEY = "name"
    name: str = "alfworld"
    """A built-in environment, one that an installed package registers, "module:Class" or
    "FILE.py:Class"."""
    train_split: str = "train"
    """Split to train on."""
    eval_split: str = "valid_unseen"
    """Split to evaluate on."""
    max_turns: Count = 50
    """Maximum number of turns in an episode."""
    reward: Positive = 10.0
    """Reward for winning, R_max. For your own environment, `reward_max` is its largest return."""
    invalid_penalty: NonNegative = 0.1
    """Penalty subtracted from the score of a turn whose response is not a valid action."""
    step_timeout_s: Seconds = 60.0
    """Seconds after which a turn of an environment counts as hung and its episode is dropped. Also
    limits how long an agent may wait for anything except the model and the environment."""
    processes: Annotated[int, Field(ge=0, le=1000)] = 0
    """Processes per rank for your own environments, for gymnasium and verifiers, and for questions
    with your own score. A process that dies, or hangs for env.step_timeout_s, is replaced, and its
    episodes are dropped. 0 runs them in threads of the trainer."""
    threads: Annotated[int, Field(ge=1, le=1000)] = 64
    """Threads per rank for environments with plain functions that may block (`may_block`): this
    many are made, reset or stepped at the same time. Coroutine environments (`async def`) need
    none."""
    max_text: Count = 1_000_000
    """Maximum number of characters of a text. A longer prompt keeps its end; a longer observation
    or anchor keeps its beginning."""


class AgentConfig(PluginSection):
    """How the model plays an episode."""

    KIND = "agents"
    KEY = "type"
    type: str = Field(
        "plain",
        description=f"{', '.join(plugins.BUILT_IN['agents'])}, or an agent of your own "
        "(docs/agents.md).",
    )


class RewardConfig(PluginSection):
    """What an episode is worth."""

    KIND = "rewards"
    KEY = "type"
    NONE = "env"
    type: str = "env"
    """env takes the environment's own reward. judge asks an LLM (docs/agents.md). "FILE.py:name" or
    "module:name" names a function of a trajectory."""


class RewardEntry(Entry):
    """Several rewards of an episode, in place of `reward`. Each is a table [[rewards]].

    The table has the keys of `reward` and these. An episode is worth the weighted sum.
    """

    LIST = "rewards"
    SECTION = "reward"
    weight: float = 1.0
    """Factor in the sum. It may be negative."""
    section: SerializeAsAny[RewardConfig]

    @classmethod
    def summary(cls, entries: "Sequence[Any]") -> RewardConfig:
        """Return the section `reward` of a run with these rewards."""
        return RewardConfig(type=" + ".join(entry.label for entry in entries))


class EnvEntry(Entry):
    """Several environments of a run, in place of `env`. Each is a table [[envs]].

    The table has the keys of `env` and these. On the command line, `--envs.LABEL.max_turns 5`
    changes a key of one environment, and `--envs.LABEL.agent.type react` changes its agent.
    """

    LIST = "envs"
    SECTION = "env"
    SECTIONS = {"agent": AgentConfig}
    LISTS = {"rewards": RewardEntry}
    share: Positive = 1.0
    """Share of an update's tasks, relative to the shares of the others."""
    agent: SerializeAsAny[AgentConfig] | None = None
    """[envs.agent], its own agent in place of the run's."""
    rewards: list[RewardEntry] = []
    """[[envs.rewards]], its own rewards in place of the run's."""
    section: SerializeAsAny[EnvConfig]

    @classmethod
    def summary(cls, entries: "Sequence[Any]") -> EnvConfig:
        """Return the section `env` of a run with these environments: the largest of each limit."""
        sections = [entry.section for entry in entries]
        limits: dict[str, Any] = {}
        for key in ("max_turns", "reward", "invalid_penalty", "step_timeout_s", "threads"):
            limits[key] = max(getattr(section, key) for section in sections)
        return EnvConfig(
            name=" + ".join(entry.label for entry in entries),
            max_text=max(section.max_text for section in sections),
            **limits,
        )


ENTRIES: dict[str, type[Entry]] = {"envs": EnvEntry, "rewards": RewardEntry}
"""The entries of each list of tables."""


class RolloutConfig(Section):
    tasks: Count = 16
    """Tasks (groups) per update."""
    group_size: Count = 8
    """Episodes per task."""
    refill: Annotated[Natural, GROUPS] = 0
    """Groups whose returns are all equal are replaced by groups of additional tasks (DAPO), of
    which at most refill times `tasks` are played."""
    curriculum: Annotated[str, Only("envs")] = ""
    """Your own function that chooses the shares of [[envs]] for each update: (step, success by
    label) -> shares by label, "module:name" or "FILE.py:name" (docs/environments.md)."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    ahead: Annotated[Natural, OnlyPlugins("engine.type", kind="engines", ability="has_pool")] = 0
    """How many updates ahead episodes are played while the trainer works. No token comes from
    weights that are more updates old than this."""
    max_prompt_tokens: Count = 2048
    """Maximum number of tokens in a prompt. A longer prompt is cut at its beginning."""
    max_response_tokens: Count = 512
    """Maximum number of tokens in a response."""


class EngineConfig(PluginSection):
    """The engine that samples responses. Each has further keys of its own."""

    KIND = "engines"
    KEY = "type"
    type: str = Field(
        "transformers",
        description=f"What samples. {plugins.meanings(plugins.ENGINES)}. Or your own engine, "
        '"module:name" or "FILE.py:name" (docs/bring-your-own.md).',
    )

    @property
    def gpus(self) -> int:
        """Number of GPUs that the run leaves to engines that it starts."""
        return 0

    @property
    def weight_folders(self) -> list[Path]:
        """Folders, besides memory, in which the run may put weights for its engines."""
        return []

    @property
    def contradiction(self) -> str:
        """Say which keys do not go together, and what would; "" if all do."""
        return ""


class AdvantageConfig(PluginSection):
    """The advantage estimator. Its own keys are the keyword-only parameters of its function."""

    KIND = "advantages"
    KEY = "type"
    type: str = Field(
        "grpo",
        description=f"{', '.join(plugins.BUILT_IN['advantages'])}, or an estimator of your own "
        "(docs/algorithm.md). ppo's baseline is a critic, see `critic`.",
    )
    penalty_only: Annotated[Literal["keep", "drop"], GROUPS] = "keep"
    """What happens to groups whose returns are all equal, so that only penalties differ. keep
    normalises them like others, which inflates the penalties. drop gives them no advantage."""

    @property
    def traits(self) -> EstimatorTraits:
        return estimator_traits(self.type)

    @property
    def anchors(self) -> Anchors:
        """What the estimator reads of anchors. To compare them by similarity takes their texts."""
        declared = self.traits.anchors
        if declared == "equality" and self.settings().get("similarity") is not None:
            return "text"
        return declared


class CriticConfig(Section):
    """PPO's critic: the start model with a scalar head."""

    ONLY: ClassVar = CRITIC
    lr: Rate = 1e-5
    """Learning rate."""
    value_clip: Positive = 0.5
    """A value is clipped to within this distance of the value that the advantages were computed
    from."""


class PolicyConfig(PluginSection):
    KIND = "losses"
    KEY = "loss"
    WITHIN = ("ppo",)
    CHOICES = tuple(plugins.POLICY_LOSSES)
    loss: str = Field(
        "ppo",
        description=f"Loss of responses: {', '.join(CHOICES)}, or one of your own, "
        '"module:name" or "FILE.py:name" (docs/algorithm.md).',
    )
    clip_low: Annotated[Share, SettingOfPpo(setting="clip_low")] = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: Annotated[NonNegative, SettingOfPpo(setting="clip_high")] = 0.2
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[float, Field(gt=1.0), SettingOfPpo(setting="dual_clip")] = 3.0
    """If the advantage is negative, the loss is at most this factor times its absolute value."""
    kl_coef: NonNegative = 0.01
    """Weight of the KL term to the start model; 0 needs no reference model."""
    entropy_coef: NonNegative = 0.001
    """Weight of the entropy bonus."""
    loss_norm: Literal["token", "sample", "group", "verl"] = "token"
    """How the loss is averaged. token: mean over the mini-batch's response tokens. sample, group:
    mean over the token means of samples or groups (Eq. (11)). verl: as in verl."""
    verl_samples: Annotated[Count, Only("policy.loss_norm", ("verl",))] = 32
    """Samples per micro-batch in verl's mean over micro-batches. Packing is not affected."""
    old_logp: Literal["trainer", "engine"] = "trainer"
    """Where the old log-probs come from. engine reuses those of the sampler. This saves a pass,
    unless something else needs it."""
    tis_cap: Annotated[float, Field(gt=1.0)] | None = None
    """Truncated importance sampling: tokens are weighted by min(pi_old / pi_sampler, cap). With
    old_logp = "engine", min(pi / pi_sampler, cap) replaces PPO's clipped ratio; with any other
    loss, the cap is then refused."""
    importance_mask: tuple[Positive, Positive] | None = None
    """Importance-sampling mask, [low, high]: tokens whose pi_old / pi_sampler is outside this range
    have no policy loss."""
    importance_level: Literal["token", "response"] = "token"
    """Which importance-sampling ratio tis_cap and importance_mask use: that of each token, or the
    geometric mean over its response."""
    offload_reference: Annotated[bool, Only("policy.kl_coef"), Only("lora.rank", (0,))] = False
    """Keep the reference model in host memory, except during its log-prob pass."""


class WorldConfig(PluginSection):
    """World-model co-training (PaW Section 3)."""

    KIND = "losses"
    KEY = "loss"
    CHOICES = tuple(plugins.WORLD_LOSSES)
    WITHIN = ("cmae", "mae", "ce", "gce")
    enabled: bool = True
    """Whether the model also learns to predict observations."""
    alpha: Annotated[Rate, WM] = 0.75
    """Share of the update's transitions to learn from. Those with the highest action entropy are
    chosen."""
    loss: Annotated[str, WM] = Field(
        "cmae",
        description="Loss of an observation token of probability p. "
        f"{plugins.meanings(plugins.WORLD_LOSSES)}. Or your own loss (docs/algorithm.md).",
    )
    rho: Annotated[Rate, WM, CMAE] = 0.2
    """Tokens with a higher probability have no loss."""
    q: Annotated[Rate, WM, GCE] = 0.7
    """Exponent of gce."""
    weight: Annotated[Literal["adaptive"] | NonNegative, WM] = "adaptive"
    """lambda_g, a group's weight: adaptive (1 - mean return / R_max, clamped to [0, 1]) or a
    constant."""
    entropy: Annotated[Literal["full", "sampled"], WM] = "full"
    """full: action entropy over the whole vocabulary. sampled: the mean of -p log p over the
    sampled tokens."""
    scale: Annotated[NonNegative, WM] = 1.0
    """Extra factor on the world-model term; the paper's is 1."""
    dedup: Annotated[bool, WM] = False
    """Learn only once from identical (prompt, response, observation) samples in an update."""
    max_tokens: Count = 512
    """Maximum number of tokens of an observation that are predicted, in training and in the
    report's examples."""


class OptimConfig(Section):
    name: Literal["adamw", "flash-adamw"] = "adamw"
    """adamw: fp32, 16 bytes per parameter including its gradient. flash-adamw: bf16 weights and
    8-bit moments, 8.1 bytes per parameter."""
    master_bits: Annotated[Literal[24, 32], FLASH] = 32
    """Bits of a weight. 24 are too few for a learning rate of 1e-6, because a weight of 0.02 then
    moves in steps of 4e-7."""
    offload: Annotated[bool, FLASH] = False
    """Keep the optimizer's state in host memory. During the step it is on the device for one
    parameter at a time."""
    grad_sync: Literal["each", "last"] = "each"
    """With several ranks: reduce gradients after each micro-batch, or only after the last one. The
    latter keeps full gradients on each rank until then."""
    lr: Rate = 1e-6
    """Learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Adam's betas."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    grad_clip: Positive = 1.0
    """Gradients are clipped to this norm."""
    warmup_updates: Natural = 0
    """Updates over which the learning rate rises to lr."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    final_lr: Annotated[Share, Only("optim.schedule", ("cosine",))] = 0.1
    """Learning rate at the end, as a share of lr."""
    epochs: Count = 1
    """Passes over the samples of each update."""
    minibatch_samples: Count = 256
    """Samples (turns) per optimizer step."""
    micro_batch_tokens: Count = 16384
    """Tokens per forward and backward pass."""
    share_prefixes: Literal["auto", "always", "never"] = "auto"
    """Whether tokens that sequences of a group share, such as a system prompt, are computed only
    once. auto does so if it saves at least 5 % of the tokens, and never for models with recurrent
    layers."""


class EvalConfig(Section):
    every: Natural = 5
    """Updates between evaluations. 0 evaluates only at the start and the end."""
    games: Natural = 128
    """Number of games, drawn from the split with eval.seed. 0 plays the whole split."""
    attempts: Count = 1
    """Attempts at each game. With more than one, pass@k and best of k are reported too."""
    temperature: NonNegative = 0.4
    """Sampling temperature; 0 is greedy."""
    seed: Seed = 1000
    """Seed of the draws and of sampling."""


class Config(Section):
    """The configuration of a run.

    Raises pydantic's ValidationError for unknown keys, and for values that are out of range or do
    not go together.
    """

    run: RunConfig = RunConfig()
    tracking: TrackingConfig = TrackingConfig()
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    warmup: WarmupConfig = WarmupConfig()
    env: SerializeAsAny[EnvConfig] = _DEFAULT
    envs: list[EnvEntry] = []
    """Several environments in one run, in place of `env`."""
    agent: SerializeAsAny[AgentConfig] = _DEFAULT
    reward: SerializeAsAny[RewardConfig] = _DEFAULT
    rewards: list[RewardEntry] = []
    """Several rewards of an episode, in place of `reward`."""
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

    @property
    def environments(self) -> dict[str, EnvConfig]:
        """The section of each environment by its label; with a single one, that is ""."""
        if not self.envs:
            return {"": self.env}
        return {entry.label: entry.section for entry in self.envs}

    @property
    def own_agents(self) -> dict[str, AgentConfig]:
        """The section of each environment's own agent, by the label of the environment."""
        return {entry.label: entry.agent for entry in self.envs if entry.agent is not None}

    @property
    def own_rewards(self) -> dict[str, list[RewardEntry]]:
        """The rewards of each environment with its own, by the label of the environment."""
        return {entry.label: entry.rewards for entry in self.envs if entry.rewards}

    def reward_types(self, label: str) -> list[str]:
        """Return the types of the rewards that episodes of an environment get."""
        rewards = self.own_rewards.get(label, self.rewards)
        return [reward.section.type for reward in rewards] or [self.reward.type]

    @field_validator("env", "agent", "reward", "engine", "advantage", "policy", "wm", mode="before")
    @classmethod
    def _with_plugin(cls, table: Any, info: ValidationInfo) -> Any:
        """Validate a section, including the keys of the plug-in that it names."""
        if not isinstance(table, dict):
            return table
        base: Any = cls.model_fields[str(info.field_name)].annotation
        try:
            return section_type(base, table.get(base.KEY)).model_validate(table)
        except UserError as error:
            name = table.get(base.KEY, base.model_fields[base.KEY].default)
            reason = str(error).removeprefix(f"'{name}': ")
            raise problem("plugin", reason, (base.KEY,), name) from None

    @model_validator(mode="before")
    @classmethod
    def _check_applying(cls, tree: Any) -> Any:
        """Refuse keys that do not apply with the others, unless they have their default value."""
        if not isinstance(tree, dict):
            return tree
        tree = _with_entries(tree)
        flat_values = flatten(tree)
        for key, key_state in keys_of(cls, flat_values).items():
            default = key_state.field.default
            if isinstance(key_state.needs, Unlisted):
                continue  # `_with_entries` has made it
            if key_state.needs and flat_values.get(key, default) != default:
                raise problem(
                    "only", f"it needs {key_state.needs}", tuple(key.split(".")), flat_values[key]
                )
        return tree

    @model_validator(mode="after")
    def _check_baseline(self) -> "Config":
        if self.rollout.group_size == 1 and self.advantage.traits.needs_groups:
            raise ValueError(
                f"rollout.group_size = 1 leaves {self.advantage.type} without a baseline; "
                "use 2 or more, or an estimator that needs no groups, such as "
                "advantage.type = 'ppo'"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> "Config":
        if self.engine.contradiction:
            raise ValueError(self.engine.contradiction)
        return self

    @model_validator(mode="after")
    def _check_importance_sampling(self) -> "Config":
        policy = self.policy
        if policy.importance_mask:
            low, high = policy.importance_mask
            if low >= high:
                raise ValueError(
                    f"policy.importance_mask = {[low, high]}: it must be [low, high] "
                    "with low < high"
                )
        uses_ratios = policy.tis_cap or policy.importance_mask
        if policy.importance_level == "response" and not uses_ratios:
            raise ValueError(
                "policy.importance_level says which ratio policy.tis_cap and "
                "policy.importance_mask use; set one of them"
            )
        if policy.old_logp == "engine":
            if policy.importance_mask or policy.importance_level == "response":
                raise ValueError(
                    "policy.importance_mask and policy.importance_level need "
                    "policy.old_logp = 'trainer'"
                )
            # There pi_old is pi_sampler, so the cap has nothing to weight. For ppo it replaces the
            # clip, see `learn.Objective`.
            if policy.tis_cap and policy.loss != "ppo":
                raise ValueError(
                    f"policy.tis_cap and policy.loss = '{policy.loss}' need "
                    "policy.old_logp = 'trainer'"
                )
        return self

    @model_validator(mode="after")
    def _check_world_model(self) -> "Config":
        names = [section.name for section in self.environments.values()]
        if "next_state" in names and self.wm.enabled:
            raise ValueError(
                "env.name = 'next_state' learns the world model by RL: set wm.enabled = false"
            )
        return self

    @model_validator(mode="after")
    def _check_curriculum(self) -> "Config":
        if self.rollout.curriculum and self.rollout.ahead:
            raise ValueError(
                "rollout.curriculum chooses an update's tasks from the success of the update "
                "before, so it cannot be played ahead: use rollout.ahead = 0"
            )
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> "Config":
        if self.lora.rank and self.advantage.traits.needs_critic:
            raise ValueError(
                f"lora.rank with advantage.type = '{self.advantage.type}': "
                "the critic trains every weight; "
                "use lora.rank = 0"
            )
        if self.optim.name == "flash-adamw":
            if self.lora.rank:
                raise ValueError("lora.rank trains fp32 adapters: use optim.name = 'adamw'")
            if self.model.dtype == "float32":
                raise ValueError(
                    "optim.name = 'flash-adamw' keeps bf16 weights: "
                    "it needs model.dtype = 'bfloat16'"
                )
        return self


def _with_entries(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree whose lists of tables are read and summed up in the sections they replace."""
    for name, kind in ENTRIES.items():
        if tree.get(name):
            entries = kind.read_all(tree[name])
            tree = tree | {name: entries, kind.SECTION: kind.summary(entries)}
    return tree
