"""One run's configuration: pydantic models, TOML recipes, dotted overrides.

A recipe is a TOML file whose tables are the fields of `Config`; `--a.b value` on the command line overrides one key.
An unknown key is an error that names the nearest known one; nothing is silently ignored. Loads no torch.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paw.errors import UserError

RECIPES = Path(__file__).parent / "recipes"
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
TaskKind = Literal["pick", "look", "clean", "heat", "cool", "two"]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RunConfig(Section):
    name: str = "run"
    dir: Path = Path("runs")
    """Parent folder; the run lives in dir/name."""
    seed: int = 0
    updates: Count = 150
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of torch; 0 leaves torch's own choice."""
    save_every: Annotated[int, Field(ge=0)] = 50
    """Updates between checkpoints; 0 saves only at the end."""
    keep: Count = 2
    """Checkpoints kept."""
    max_skipped: Count = 3
    """Updates in a row with non-finite gradients before the run stops."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = []


class ModelConfig(Section):
    path: str
    """Hugging Face name or folder, or "quickstart": a small Qwen2 made on the spot (see `warmup`)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False


class WarmupConfig(Section):
    """The quickstart model: its size, and a supervised warm-up on expert play."""

    hidden_size: Count = 64
    layers: Count = 3
    head_size: Count = 32
    intermediate_size: Count = 160
    initializer_range: Positive = 0.1
    stop_success: Share = 0.18
    """Success at temperature 1 on warm-up games at which the warm-up stops."""
    max_steps: Count = 1600
    batch_size: Count = 64
    lr: Positive = 3e-3
    random_actions: Share = 0.3
    """Share of random actions executed during expert play, so that the model sees states off the expert's path."""
    lm_weight: NonNegative = 0.3
    """Weight of next-token prediction on prompt and observation beside that on the answer."""
    seed: int = 0


class EnvConfig(Section):
    name: Literal["alfworld"] = "alfworld"
    backend: Literal["native", "textworld"] = "native"
    data: Path | None = None
    """Folder with json_2.1.1 game files; none plays games generated on the fly."""
    train_split: str = "train"
    eval_split: str = "valid_unseen"
    difficulty: Literal["tiny", "small", "medium", "full"] = "full"
    """Size of generated rooms (unused with `data`)."""
    kinds: list[TaskKind] = ["pick", "look", "clean", "heat", "cool", "two"]
    max_turns: Count = 50
    history: Annotated[int, Field(ge=0)] = 2
    style: Literal["paper", "compact"] = "paper"
    """`paper`: Figure 7's prompt, <action> tags. `compact`: short prompt for tiny models, the answer is the action."""
    think: bool = True
    """Whether a valid answer needs <think>...</think> (paper style)."""
    reward: Positive = 10.0
    """Reward for winning, R_max."""
    invalid_penalty: NonNegative = 0.1
    step_timeout_s: Positive = 60.0
    """Seconds before a worker-hosted environment counts as hung (textworld back end)."""


class RolloutConfig(Section):
    engine: Literal["transformers", "vllm"] = "transformers"
    tasks: Count = 16
    """Tasks (groups) of one update."""
    group_size: Count = 8
    temperature: Positive = 1.0
    max_prompt_tokens: Count = 2048
    max_response_tokens: Count = 512
    max_batch_tokens: Count = 65536
    """transformers engine: padded prompt tokens of one forward pass."""
    gpu_memory_utilization: Share = 0.5
    """vLLM: share of the device's memory for weights and KV cache."""


class AdvantageConfig(Section):
    estimator: Literal["grpo", "rloo", "gigpo"] = "grpo"
    stat: Literal["steps", "trajectories"] = "steps"
    norm_std: bool = True
    """False is Dr. GRPO."""
    eps: NonNegative = 1e-6
    """Added to the standard deviation."""
    penalty_only: Literal["keep", "drop"] = "keep"
    """`drop`: groups whose returns are all equal get no advantage, instead of blowing up the penalties."""
    gigpo_norm: Literal["mean_std", "mean"] = "mean_std"
    omega: NonNegative = 1.0
    gamma: Share = 0.95
    similarity: Share | None = None
    """GiGPO anchors: none clusters equal texts, else difflib ratio at or above this."""


class PolicyConfig(Section):
    clip_low: Share = 0.2
    clip_high: NonNegative = 0.2
    dual_clip: Annotated[float, Field(gt=1.0)] = 3.0
    kl_coef: NonNegative = 0.01
    entropy_coef: NonNegative = 0.001
    loss_norm: Literal["token", "row"] = "token"
    old_logp: Literal["trainer", "engine"] = "trainer"
    """`engine` takes the sampler's log-probs and saves the scoring pass where nothing else needs it."""


class WorldConfig(Section):
    """World-model co-training (PaW Section 3)."""

    enabled: bool = True
    alpha: Annotated[float, Field(gt=0.0, le=1.0)] = 0.75
    rho: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    loss: Literal["cmae", "mae", "ce"] = "cmae"
    weight: Literal["adaptive"] | NonNegative = "adaptive"
    """lambda_g: adaptive (1 - mean return / R_max) or a constant."""
    entropy: Literal["full", "sampled"] = "full"
    scale: NonNegative = 1.0
    """Extra factor on the world-model term; the paper's is 1."""
    max_tokens: Count = 512


class OptimConfig(Section):
    lr: Positive = 1e-6
    betas: tuple[Share, Share] = (0.9, 0.999)
    weight_decay: NonNegative = 0.01
    grad_clip: Positive = 1.0
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "cosine"] = "constant"
    final_lr: Share = 0.1
    """cosine: share of lr left at the end."""
    epochs: Count = 1
    minibatch_rows: Count = 256
    """Rows (turns) of one optimizer step."""
    micro_batch_tokens: Count = 16384
    """Padded tokens of one forward and backward pass."""


class EvalConfig(Section):
    every: Annotated[int, Field(ge=0)] = 5
    """Updates between evaluations; 0 evaluates only at the start and the end."""
    games: Annotated[int, Field(ge=0)] = 128
    """Seeded draws of the split; 0 plays the whole split."""
    temperature: NonNegative = 0.4
    seed: int = 1000


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    warmup: WarmupConfig = WarmupConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    policy: PolicyConfig = PolicyConfig()
    wm: WorldConfig = WorldConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.rollout.group_size == 1:
            raise ValueError(
                f"rollout.group_size = 1 leaves {self.advantage.estimator} without a baseline; use 2 or more"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load(recipe: str | Path, overrides: dict[str, str] | None = None) -> Config:
    """Read a recipe by name or path, apply `{"a.b": "value"}` overrides, validate.

    Raises UserError for an unknown recipe, malformed TOML, an unknown key or a value out of range.
    """
    path = Path(recipe) if str(recipe).endswith(".toml") else RECIPES / f"{recipe}.toml"
    if not path.is_file():
        near = difflib.get_close_matches(str(recipe), recipe_names(), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(recipe_names())}"
        raise UserError(f"unknown recipe '{recipe}': {hint} (or give the path of a .toml file)")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    for key, text in (overrides or {}).items():
        _set(tree, key, text)
    return validate(tree, origin=str(recipe))


def validate(tree: dict[str, Any], *, origin: str) -> Config:
    """Build a Config from nested dicts; the first problem becomes a one-line UserError that names `origin`."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"] if part not in ("literal['adaptive']", "constrained-float"))
        if problem["type"] == "extra_forbidden":
            raise UserError(f"{origin}: unknown key '{key}'{_nearest(key)}") from None
        if problem["type"] == "missing":
            raise UserError(f"{origin}: '{key}' is missing; set it in the recipe or with --{key} VALUE") from None
        message = problem["msg"].removeprefix("Value error, ")
        raise UserError(f"{origin}: {key} = {problem['input']!r}: {message}" if key else message) from None


def dump(config: Config) -> str:
    """The whole resolved configuration as TOML; `load` of it gives the same Config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key of a configuration."""
    keys = []
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += known_keys(kind, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _nearest(key: str) -> str:
    keys = known_keys()
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if not near:  # a right name in the wrong section
        near = [k for k in keys if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    return f"; did you mean '{near[0]}'?" if near else ""


def _set(tree: dict[str, Any], key: str, text: str) -> None:
    if key not in known_keys():
        raise UserError(f"command line: unknown key '--{key}'{_nearest(key)}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    node = tree
    *parents, leaf = key.split(".")
    for part in parents:
        node = node.setdefault(part, {})
    node[leaf] = value
