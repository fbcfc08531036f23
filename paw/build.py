"""Build the parts of a run from its configuration: environment, models, engine, optimizer.

Cheap checks run first.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from paw.algo.packing import Packing
from paw.checkpoint.train_state import Learner
from paw.config.sections import Config, LoraConfig
from paw.distributed.ranks import Ranks
from paw.envs import make_factory
from paw.envs.base import EnvFactory, eval_tasks, train_tasks
from paw.envs.load import check_reward_max
from paw.envs.several import named_entry, parts_of
from paw.errors import needed
from paw.guards import UpdateGuard
from paw.model.attention import decoder_layers, pick_attention
from paw.model.check import check_path, longest_row
from paw.model.critic import Critic, load_critic
from paw.model.dtype import training_dtype
from paw.model.folder import copy_to_this_machine
from paw.model.fused import Layers, choose_layers
from paw.model.loading import load_policy, load_tokenizer
from paw.model.lora import add_adapters, check_targets
from paw.model.optim import make_optimizer
from paw.model.patches import apply_liger, compile_layers, import_liger
from paw.model.policy import DTYPES, Policy, pick_backend, pick_device, weights_dtype
from paw.rollouts.engines import find_engine
from paw.rollouts.engines.base import Closable, Engine
from paw.rollouts.engines.make import make_engine, start_engine
from paw.rollouts.episode import find_agent, find_own_agents
from paw.rollouts.text.chat import Chat
from paw.rundir.resume import recorded_dtype
from paw.types import Ids, as_ids


@dataclass(frozen=True)
class Preparation:
    """What a run needs from the tools before it loads a model. The core does not import tools."""

    start_model: Callable[[Path | None, Config, Callable[[str], None], Ranks], str]
    """(directory of a run to resume, configuration, message, ranks) -> the model's folder, or its
    Hugging Face name. All ranks call it, and all get the result of the first. `message` is called
    with each line of progress."""
    check_memory: Callable[[Config, torch.device, Ranks], None]
    """Raises UserError if model and optimizer cannot fit this machine."""


WITHOUT_TOOLS = Preparation(
    start_model=lambda resumed, config, message, ranks: config.model.path,
    check_memory=lambda config, device, ranks: None,
)
"""For configurations that name their model. It does not plan memory."""


@dataclass
class Parts:
    factory: EnvFactory
    tokenizer: Any
    chat: Chat
    policy: Policy
    reference: Policy
    """The policy itself if there is no separate model. That is so without a KL term, and with LoRA,
    whose adapters are switched off to get the reference."""
    critic: Critic | None
    engine: Engine
    learners: list[Learner]
    packing: Packing
    encode_observation: Callable[[str], Ids]
    path: str
    """The model's folder on this machine, or its Hugging Face name."""
    info: dict[str, Any]
    """For run.json: start (the model it began from), the dtype of its computations, the backend of
    the head, how the layers are computed, warmup_s."""


class Kernels(NamedTuple):
    """The kernels that the models use."""

    head_backend: str
    attention: str


class Start(NamedTuple):
    """What the run begins from, and how its models are computed. The same on all ranks."""

    model: str
    """The start model's folder, or its Hugging Face name."""
    path: str
    """The same, on this machine."""
    dtype: str
    """Dtype of its computations."""
    kernels: Kernels
    layers: Layers
    warmup_s: float

    @property
    def info(self) -> dict[str, Any]:
        """Entries of run.json."""
        return {
            "start": self.model,
            "dtype": self.dtype,
            "backend": self.kernels.head_backend,
            "layers": str(self.layers),
            "warmup_s": self.warmup_s,
        }


class Models(NamedTuple):
    policy: Policy
    reference: Policy
    """The policy itself if there is no separate model."""
    critic: Policy | None

    @property
    def distinct(self) -> list[Policy]:
        models = [self.policy]
        if self.reference is not self.policy:
            models.append(self.reference)
        if self.critic is not None:
            models.append(self.critic)
        return models


class Loaded(NamedTuple):
    tokenizer: Any
    chat: Chat
    models: Models
    engine: Engine


def join_ranks(device: torch.device, *, peer_timeout_s: float = 600.0) -> Ranks:
    """Join the other ranks described by torchrun's environment variables.

    Raises UserError if the variables contradict each other.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Ranks()
    from paw.distributed.parallel import DistributedRanks, read_variables  # slow: FSDP

    rank, world_size, on_host = read_variables()
    if world_size == 1:
        return Ranks()
    return DistributedRanks.join(rank, world_size, on_host, device, peer_timeout_s=peer_timeout_s)


def check_environment(config: Config) -> EnvFactory:
    """Return the environment of the run.

    Raises UserError if the environment or an agent is unusable, or reward_max is missing.
    """
    find_agent(config)
    find_own_agents(config)
    factory = make_factory(config)
    for label, env_part in parts_of(factory, config.env).items():
        with named_entry(label):
            if config.wm.enabled and config.wm.weight == "adaptive":
                check_reward_max(env_part.factory, env_part.config.name)
            train_tasks(env_part.factory, 0, 1, config.run.seed, split=env_part.config.train_split)
            eval_tasks(env_part.factory, env_part.config.eval_split, 1, config.eval.seed)
    return factory


def check_extras(config: Config, device: torch.device) -> None:
    """Raises UserError if the engine, or a library that the configuration needs, is missing."""
    find_engine(config.engine.type)
    if config.lora.rank:
        needed("peft", "lora.rank", "lora")
    if config.model.liger is True:
        import_liger(device)


def choose_dtype(
    config: Config, device: torch.device, ranks: Ranks, *, resumed: Path | None
) -> tuple[str, list[str]]:
    """Return (the dtype of the run's computations, lines to report). All ranks must call it.

    "auto" means bfloat16 if that suits the machines of all ranks. A run that is resumed from its
    directory `resumed` keeps the dtype it began with. A different dtype would give different
    numbers, and with LoRA a different base model.
    """
    if config.model.dtype != "auto":
        return config.model.dtype, []
    suitable = ranks.gather(training_dtype(config, device))
    dtype = "float32" if "float32" in suitable else "bfloat16"
    began_in = ranks.broadcast_from_rank0(lambda: recorded_dtype(resumed) if resumed else "")
    if began_in in ("", dtype):
        return dtype, []
    change = f"--model.dtype {dtype}, which suits this machine, changes that"
    return began_in, [
        f"model.dtype = 'auto': the run began in {began_in} and continues in it ({change})"
    ]


def build(
    config: Config,
    factory: EnvFactory,
    ranks: Ranks,
    stack: ExitStack,
    *,
    resumed: Path | None,
    preparation: Preparation,
    message: Callable[[str], None],
) -> Parts:
    """Load, shard and check everything, with rank 0's weights. All ranks must call it.

    Whatever has to be closed is added to `stack`. `resumed` is the directory of a run to resume,
    which began from its own warm-up model. `config.model.dtype` must not be "auto".
    """
    device = pick_device(config.model.device)
    start = _prepare_start(
        config, device, ranks, resumed=resumed, preparation=preparation, message=message
    )
    tokenizer, chat, models, engine = _load(config, start, device, ranks, stack)

    packing = Packing.of(config.optim, models.policy, ranks=ranks)
    learners, critic = _make_learners(config, models, ranks, packing)
    _seed_generators(config.run.seed)
    return Parts(
        factory=factory,
        tokenizer=tokenizer,
        chat=chat,
        policy=models.policy,
        reference=models.reference,
        critic=critic,
        engine=engine,
        learners=learners,
        packing=packing,
        encode_observation=_observation_encoder(chat, config.wm.max_tokens),
        path=start.path,
        info=start.info,
    )


def _prepare_start(
    config: Config,
    device: torch.device,
    ranks: Ranks,
    *,
    resumed: Path | None,
    preparation: Preparation,
    message: Callable[[str], None],
) -> Start:
    """Agree on kernels, make or find the model that the run begins from, and choose the layers."""
    kernels = _agree_on_kernels(config, device, ranks)

    warmup_start = time.monotonic()
    model = preparation.start_model(resumed, config, message, ranks)
    warmup_s = round(time.monotonic() - warmup_start, 1)
    path = copy_to_this_machine(model, ranks) if ranks.world_size > 1 else model

    layers, lines = choose_layers(config, path, device, attention=kernels.attention, ranks=ranks)
    for line in lines:
        message(line)
    return Start(
        model=model,
        path=path,
        dtype=config.model.dtype,
        kernels=kernels,
        layers=layers,
        warmup_s=warmup_s,
    )


def _load(
    config: Config, start: Start, device: torch.device, ranks: Ranks, stack: ExitStack
) -> Loaded:
    """Load the tokenizer and the models, which are then compiled and sharded, and make the engine.

    The engine is made before the policy gets adapters and is sharded, because it copies what it
    needs. `stack` closes it.
    """
    adapters = _sent_adapters(config, find_engine(config.engine.type))
    started = _start_engine(config, start.path, device, ranks, adapters, stack)
    tokenizer = ranks.run_on_all(lambda: load_tokenizer(start.path))
    chat = Chat(tokenizer, config.model.chat_template_kwargs, config.model.tool_parser)

    models = _load_models(config, start.path, device, start.kernels, ranks)
    _send_buffers(models.distinct, ranks)
    if start.layers.liger:
        for model in models.distinct:
            apply_liger(model.lm)

    engine = make_engine(
        config,
        policy=models.policy,
        chat=chat,
        model_path=start.path,
        ranks=ranks,
        started=started,
        lora=adapters,
        own_weights=ranks.world_size > 1,
        check=ranks.first,
    )
    stack.callback(engine.close)
    if config.lora.rank:
        add_adapters(models.policy.lm, config.lora, seed=config.run.seed)
    _compile_and_shard(config, models, ranks, compiled=start.layers.compiled)
    check_path(models.policy, start.path)
    return Loaded(tokenizer=tokenizer, chat=chat, models=models, engine=engine)


def _observation_encoder(chat: Chat, max_tokens: int) -> Callable[[str], Ids]:
    @lru_cache(65536)  # environments repeat themselves
    def encode(text: str) -> Ids:
        return as_ids(chat.observation_ids(text, max_tokens))

    return encode


def _agree_on_kernels(config: Config, device: torch.device, ranks: Ranks) -> Kernels:
    """Return the kernels for all ranks. Raises UserError if a rank cannot use those of rank 0."""
    dtype = config.model.dtype

    # Rank 0 alone resolves "auto": measurements on other machines may favour a different choice.
    wanted = ranks.broadcast_from_rank0(
        lambda: pick_backend(config.model.head_backend, device, dtype, config.model.path)
    )

    def pick() -> Kernels:
        return Kernels(
            head_backend=pick_backend(wanted, device, dtype, config.model.path),
            attention=pick_attention(config.model.attention, device, DTYPES[dtype]),
        )

    kernels = ranks.run_on_all(pick)
    ranks.check_agreement(
        f"{kernels.head_backend} {kernels.attention}",
        "rank {} has different kernels from rank 0: install the same, or name some in "
        "model.attention and head_backend",
    )
    return kernels


def _sent_adapters(config: Config, engine_type: type[Engine]) -> LoraConfig | None:
    """Return the adapters that are sent to the engine separately from the base weights, if any."""
    if config.lora.rank and config.lora.send == "adapters" and engine_type.takes_adapters:
        return config.lora
    return None


def _start_engine(
    config: Config,
    path: str,
    device: torch.device,
    ranks: Ranks,
    adapters: LoraConfig | None,
    stack: ExitStack,
) -> Closable | None:
    """Start the processes that the engine needs, on rank 0. `stack` closes them."""
    if not ranks.first:
        return None
    started = start_engine(config, path, device=device, ranks=ranks, lora=adapters)
    if started:
        stack.callback(started.close)
    return started


def _load_models(
    config: Config, path: str, device: torch.device, kernels: Kernels, ranks: Ranks
) -> Models:
    """Load the models: onto the device if there is one rank, else into host memory until sharded.

    They are empty on all ranks but the first.
    """
    is_alone = ranks.world_size == 1
    shared_options: dict[str, Any] = {
        "dtype": config.model.dtype,
        "device": device,
        "weights": weights_dtype(config),
        "attention": kernels.attention,
        "head_backend": kernels.head_backend,
        "empty": not ranks.first,
        "longest": longest_row(config),
    }
    training_options: dict[str, Any] = {
        **shared_options,
        "on_device": is_alone,
        "checkpointing": config.model.checkpointing,
        "offload_activations": config.model.offload_activations,
    }

    policy = load_policy(path, **training_options)
    reference = policy
    if config.lora.rank:
        check_targets(policy.lm, config.lora)
    elif config.policy.kl_coef:
        on_device = is_alone and not config.policy.offload_reference
        reference = load_policy(path, on_device=on_device, check=False, **shared_options)
        reference.eval().requires_grad_(False)

    critic = None
    if config.advantage.traits.needs_critic:
        critic = load_critic(path, **training_options)
    return Models(policy=policy, reference=reference, critic=critic)


def _send_buffers(models: Sequence[Policy], ranks: Ranks) -> None:
    """Give all ranks the buffers of rank 0, because the biases of some routers are not parameters.

    The buffers also take the dtypes of rank 0: the empty models of other ranks lack the dtypes of
    the files.
    """
    buffers = [buffer for model in models for buffer in model.buffers()]
    dtypes = ranks.broadcast_from_rank0(
        lambda: [str(buffer.dtype).removeprefix("torch.") for buffer in buffers], list[str]
    )
    for buffer, dtype in zip(buffers, dtypes, strict=True):
        buffer.data = buffer.data.to(getattr(torch, dtype))
        ranks.broadcast(buffer, 0)


def _compile_and_shard(config: Config, models: Models, ranks: Ranks, *, compiled: bool) -> None:
    ranks_of_a_copy = {"none": 1, "node": ranks.on_host}.get(config.model.shard)
    for model in models.distinct:
        if compiled:
            compile_layers(model.lm)
        is_reference = model is models.reference and model is not models.policy
        ranks.shard(
            model,
            model.dtype,
            layers=decoder_layers(model),
            offload=config.policy.offload_reference and is_reference,
            sharers=ranks_of_a_copy,
        )


def _make_learners(
    config: Config, models: Models, ranks: Ranks, packing: Packing
) -> tuple[list[Learner], Critic | None]:
    """Return the models that are trained: the policy first, then the critic if there is one."""
    policy_learner = Learner(
        prefix="",
        model=models.policy,
        optimizer=make_optimizer(models.policy.parameters(), config.optim),
        guard=UpdateGuard(config.run.max_skipped),
    )
    if models.critic is None:
        return [policy_learner], None
    critic = Critic(models.critic, config, ranks, packing)
    critic_learner = Learner(
        prefix="critic_", model=critic.model, optimizer=critic.optimizer, guard=critic.guard
    )
    return [policy_learner, critic_learner], critic


def _seed_generators(seed: int) -> None:
    """Seed all generators, after the warm-up, which draws numbers unless its model was cached."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
