"""Settings that have no effect beside the others: a run and --dry-run warn of each. Loads no torch."""

from collections.abc import Callable
from operator import attrgetter

from paw.config import Config
from paw.recipe import known_keys

RULES: tuple[tuple[str, str, Callable[[Config], object]], ...] = (
    ("wm.alpha wm.rho wm.loss wm.q wm.weight wm.entropy wm.scale wm.dedup", "wm.enabled", lambda c: c.wm.enabled),
    ("wm.rho", "wm.loss = 'cmae'", lambda c: c.wm.loss == "cmae"),
    ("wm.q", "wm.loss = 'gce'", lambda c: c.wm.loss == "gce"),
    ("policy.verl_rows", "policy.loss_norm = 'verl'", lambda c: c.policy.loss_norm == "verl"),
    ("policy.clip_low policy.clip_high policy.dual_clip", "no policy.tis_cap beside policy.old_logp = 'engine'",
     lambda c: not (c.policy.tis_cap and c.policy.old_logp == "engine")),
    ("policy.offload_reference", "policy.kl_coef > 0 without LoRA", lambda c: c.policy.kl_coef and not c.lora.rank),
    ("advantage.omega advantage.gamma advantage.similarity advantage.gigpo_norm", "advantage.estimator = 'gigpo'",
     lambda c: c.advantage.estimator == "gigpo"),
    ("advantage.norm_std", "advantage.estimator = 'grpo'", lambda c: c.advantage.estimator == "grpo"),
    ("advantage.eps", "advantage.estimator = 'grpo' or 'gigpo'", lambda c: c.advantage.estimator in ("grpo", "gigpo")),
    ("advantage.stat advantage.penalty_only", "a baseline from the group", lambda c: c.advantage.estimator != "ppo"),
    ("critic.", "advantage.estimator = 'ppo'", lambda c: c.advantage.estimator == "ppo"),
    ("lora.alpha lora.targets", "lora.rank > 0", lambda c: c.lora.rank),
    ("warmup.", "model.path = 'quickstart'", lambda c: c.model.path == "quickstart"),
    ("optim.master_bits", "optim.name = 'flash-adamw'", lambda c: c.optim.name == "flash-adamw"),
    ("optim.final_lr", "optim.schedule = 'cosine'", lambda c: c.optim.schedule == "cosine"),
    ("rollout.max_batch_tokens", "rollout.engine = 'transformers'", lambda c: c.rollout.engine == "transformers"),
    ("rollout.gpu_memory_utilization rollout.sleep_level", "rollout.engine = 'vllm'",
     lambda c: c.rollout.engine == "vllm"),
    ("env.difficulty", "generated games: no env.data", lambda c: not c.env.data or c.model.path == "quickstart"),
    ("env.think", "env.style = 'paper'", lambda c: c.env.style == "paper"),
    ("agent. endpoint.", "paw eval", lambda c: False),
    ("env.step_timeout_s", "env.backend = 'textworld', env.name = 'tau2' or an environment of your own",
     lambda c: c.env.backend == "textworld" or c.env.name == "tau2" or ":" in c.env.name),
    ("env.kinds env.backend", "env.name = 'alfworld'", lambda c: c.env.name not in ("webshop", "search", "tau2")),
    ("env.difficulty", "env.name = 'alfworld'",  # the small recipes are built on one for ALFWorld
     lambda c: c.env.name not in ("webshop", "search", "tau2") or c.model.path == "quickstart"),
    ("env.history env.style", "another env.name than 'tau2'", lambda c: c.env.name != "tau2"),
    ("webshop.", "env.name = 'webshop'", lambda c: c.env.name == "webshop"),
    ("webshop.catalogue", "env.data", lambda c: c.env.data),
    ("webshop.products", "a generated shop: no env.data", lambda c: not c.env.data),
    ("search.", "env.name = 'search'", lambda c: c.env.name == "search"),
    ("search.entities", "a generated world: no env.data", lambda c: not c.env.data),
    ("search.encoder", "search.retriever = 'dense'",  # a recipe's may be replaced by a server or a simulator
     lambda c: c.search.retriever != "bm25"),
    ("search.timeout_s", "a server's URL as search.retriever", lambda c: "://" in c.search.retriever),
    ("simulator.", "search.retriever = 'zerosearch'", lambda c: c.search.retriever == "zerosearch"),
    ("tau2.", "env.name = 'tau2'", lambda c: c.env.name == "tau2"),
)  # fmt: skip
"""Keys, or the start of their names; what they need, in words; whether that is given."""


def ignored(config: Config) -> list[str]:
    """One line for each setting without effect. One that has its default value is not told: it changes nothing."""
    default, lines = Config.model_validate({"model": {"path": config.model.path}}), {}
    for names, need, met in RULES:
        if met(config):
            continue
        for key in known_keys():
            value = attrgetter(key)(config)
            if key.startswith(tuple(names.split())) and value != attrgetter(key)(default):
                lines.setdefault(key, f"warning: {key} = {value!r} has no effect: it needs {need}")
    return list(lines.values())
