"""From a configuration to the parts of a run: environment, models, engine, optimizer.

Cheap checks come first.
"""

import importlib
import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paw.config import Config
from paw.envs import make_factory
from paw.envs.base import EnvFactory, eval_tasks, train_tasks
from paw.envs.load import check_reward_max
from paw.errors import needed
from paw.model.attention import pick_attention
from paw.model.check import check_path, longest_row
from paw.model.dtype import training_dtype
from paw.model.optim import make_optimizer
from paw.model.policy import (
    DTYPES,
    Policy,
    load_policy,
    load_tokenizer,
    pick_backend,
    pick_device,
    weights_dtype,
)
from paw.model.ranks import Ranks
from paw.rollouts.chat import Chat
from paw.rollouts.engines import find_engine, make_engine
from paw.rollouts.engines.base import Engine
from paw.rollouts.episode import find_agent
from paw.state.export import start_model
from paw.state.guards import UpdateGuard
from paw.state.resume import recorded_dtype
from paw.state.train_state import Learner

if TYPE_CHECKING:
    from paw.algo.critic import Critic

PLANNED = 64
"""Bytes of host memory for each byte of the model's files, below which a run is planned before it is loaded."""


@dataclass
class Parts:
    factory: EnvFactory
    tokenizer: Any
    chat: Chat
    policy: Policy
    reference: Policy
    """The policy itself where none is needed; with LoRA, which has its adapters switched off for it."""
    critic: "Critic | None"
    engine: Engine
    learners: list[Learner]
    encode_observation: Callable[[str], list[int]]
    path: str
    """Of the model's folder on this machine, or its Hugging Face name."""
    info: dict[str, Any]
    """Of run.json: start (the model it began from), dtype that it is computed in, backend of the head, warmup_s."""


def join_ranks(device: torch.device, *, episodes: int, peer_timeout_s: float = 600.0) -> Ranks:
    """Meet the peers that torchrun's variables tell of. UserError where these do not fit, or
    outnumber an update's `episodes`."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Ranks()
    from paw.model.parallel import DistributedRanks, read_variables

    variables = read_variables(episodes)
    return (
        DistributedRanks(*variables, device, peer_timeout_s=peer_timeout_s)
        if variables[1] > 1
        else Ranks()
    )


def check_environment(config: Config) -> EnvFactory:
    """The environment of the run.

    UserError where it, or the run's agent, cannot play, or lacks the best reward.
    """
    find_agent(config)
    factory = make_factory(config)
    if config.wm.enabled and config.wm.weight == "adaptive":
        check_reward_max(factory, config.env.name)
    train_tasks(factory, 0, 1, config.run.seed, split=config.env.train_split)
    eval_tasks(factory, config.env.eval_split, 1, config.eval.seed)
    return factory


def check_extras(config: Config, device: torch.device) -> None:
    """UserError for a library that is needed and not installed, or an engine that is none."""
    find_engine(config.engine.type)
    if config.lora.rank:
        needed("peft", "lora.rank", "lora")
    if config.model.liger:
        from paw.model.patches import import_liger

        import_liger(device)


def check_memory(config: Config, device: torch.device, ranks: Ranks) -> None:
    """UserError where the plan (`paw plan`) says that model and optimizer cannot fit this machine.

    On a CPU a model whose files are small beside its memory is not planned for.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    if device.type == "cpu" and 0 < files * PLANNED < memory:
        return
    gib = (
        torch.cuda.get_device_properties(device).total_memory / 2**30
        if device.type == "cuda"
        else None
    )
    fit: Any = importlib.import_module("paw.tools.fit")
    fit.check_machine(config, gpus=ranks.world_size, gpu_gib=gib, on_host=ranks.on_host)


def choose_dtype(
    config: Config, device: torch.device, ranks: Ranks, *, past: Path | None
) -> tuple[str, list[str]]:
    """(What the run is computed in, what to report about it); a call of all ranks.

    "auto" is bfloat16 if that suits the machines of all ranks. A resumed run, whose directory is
    `past`, keeps what it began with: another precision gives other numbers, and with LoRA another
    base model.
    """
    if config.model.dtype != "auto":
        return config.model.dtype, []
    suits = ranks.gather(training_dtype(config, device))
    dtype = "float32" if "float32" in suits else "bfloat16"
    began_in = ranks.broadcast_from_rank0(lambda: recorded_dtype(past) if past else "")
    if began_in in ("", dtype):
        return dtype, []
    change = f"--model.dtype {dtype}, which suits this machine, changes that"
    return began_in, [
        f"model.dtype = 'auto': the run began in {began_in} and goes on in it ({change})"
    ]


def build(
    config: Config,
    factory: EnvFactory,
    ranks: Ranks,
    stack: ExitStack,
    *,
    run: Path | None,
    message: Callable[[str], None],
) -> Parts:
    """Load, shard and check everything, sent by rank 0; a call of all ranks. `stack` closes what has to be closed.

    `run` is the directory of a run to resume, which began from its own warm-up model.
    `config.model.dtype` is not "auto" any more.
    """
    device = pick_device(config.model.device)
    kernels = device, config.model.dtype, config.model.path
    # Where it is to choose, rank 0 does: what was measured on other machines may say otherwise
    # there.
    wanted = ranks.broadcast_from_rank0(lambda: pick_backend(config.model.head_backend, *kernels))

    def pick() -> tuple[str, str]:
        backend = pick_backend(wanted, *kernels)
        return backend, pick_attention(config.model.attention, device, DTYPES[config.model.dtype])

    backend, attention = ranks.everywhere(pick)
    other = "rank {} has other kernels than rank 0: install the same, or name some in model.attention and head_backend"
    ranks.agree(f"{backend} {attention}", other)
    began = time.monotonic()
    path = ranks.broadcast_from_rank0(lambda: start_model(run, config, message))
    info = {
        "start": path,
        "dtype": config.model.dtype,
        "backend": backend,
        "warmup_s": round(time.monotonic() - began, 1),
    }
    if ranks.world_size > 1:
        from paw.model.folder import on_this_machine

        path = on_this_machine(path, ranks)
    engine_type = find_engine(config.engine.type)
    lora = None
    if config.lora.rank and config.lora.send == "adapters" and engine_type.takes_adapters:
        lora = config.lora
    started = None
    if ranks.first:
        started = engine_type.start(config, path, device=device, ranks=ranks, lora=lora)
    if started:
        stack.callback(started.close)
    tokenizer = ranks.everywhere(lambda: load_tokenizer(path))
    chat = Chat(tokenizer, config.model.chat_template_kwargs, config.model.tool_parser)

    alone, ppo = ranks.world_size == 1, config.advantage.type == "ppo"
    options: dict[str, Any] = {
        "dtype": config.model.dtype,
        "device": device,
        "weights": weights_dtype(config),
        "attention": attention,
        "head_backend": backend,
        "empty": not ranks.first,
        "longest": longest_row(config),
    }
    trained: dict[str, Any] = {
        "place": alone,
        "checkpointing": config.model.checkpointing,
        "offload_activations": config.model.offload_activations,
    }
    policy = reference = load_policy(path, **trained, **options)
    if config.lora.rank:
        from paw.model.lora import check_targets

        check_targets(policy.lm, config.lora)
    elif config.policy.kl_coef:
        here = alone and not config.policy.offload_reference
        reference = (
            load_policy(path, place=here, check=False, **options).eval().requires_grad_(False)
        )
    models = [policy] if reference is policy else [policy, reference]
    if ppo:
        from paw.algo.critic import load_critic

        models.append(load_critic(path, **trained, **options))
    buffers = [
        buffer for model in models for buffer in model.buffers()
    ]  # some routers' biases are no parameters
    dtypes = ranks.broadcast_from_rank0(
        lambda: [str(buffer.dtype).partition(".")[2] for buffer in buffers], list[str]
    )
    for buffer, dtype in zip(buffers, dtypes, strict=True):
        buffer.data = buffer.data.to(
            getattr(torch, dtype)
        )  # made without files, none was kept in float32
        ranks.broadcast(buffer, 0)
    if config.model.liger:
        from paw.model.patches import apply_liger

        for model in models:
            apply_liger(model.lm)
    engine = make_engine(
        config,
        policy=policy,
        chat=chat,
        model_path=path,
        ranks=ranks,
        started=started,
        lora=lora,
        own_weights=not alone,
        check=ranks.first,
    )
    stack.callback(engine.close)
    if config.lora.rank:  # after the engine has copied what it needs
        from paw.model.lora import add_adapters

        add_adapters(policy.lm, config.lora, seed=config.run.seed)
    for model in models:
        if config.model.compile:
            from paw.model.patches import compile_layers

            compile_layers(model.lm)
        kept_out = config.policy.offload_reference and model is reference is not policy
        sharers = {"none": 1, "node": ranks.on_host}.get(config.model.shard)
        ranks.shard(model, model.dtype, offload=kept_out, sharers=sharers)
    check_path(policy, path)

    learners = [
        Learner(
            "",
            policy,
            make_optimizer(policy.parameters(), config.optim),
            UpdateGuard(config.run.max_skipped),
        )
    ]
    critic = None
    if ppo:
        from paw.algo.critic import Critic

        critic = Critic(models[-1], config, ranks)
        learners.append(Learner("critic_", critic.model, critic.optimizer, critic.guard))
    # After the warm-up, which a cached model has not gone through.
    torch.manual_seed(config.run.seed)
    random.seed(config.run.seed)
    np.random.seed(config.run.seed % 2**32)
    return Parts(
        factory=factory,
        tokenizer=tokenizer,
        chat=chat,
        policy=policy,
        reference=reference,
        critic=critic,
        engine=engine,
        learners=learners,
        # environments repeat themselves
        encode_observation=lru_cache(65536)(
            lambda text: chat.observation_ids(text, config.wm.max_tokens)
        ),
        path=path,
        info=info,
    )
