"""Error messages for unknown keys, with the key that was probably meant."""

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any

from paw.config.entries import Entry, entry_of
from paw.config.keys import LISTS, Flat, built_in, flatten, keys_of, own_fields
from paw.config.sections import ENTRIES, Config
from paw.config.values import PluginSection
from paw.errors import UserError, clean, nearest

SYNONYMS = {
    "optim.lr": "actor_lr learning_rate",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.grad_clip": "max_grad_norm clip_grad",
    "optim.schedule": "lr_scheduler_type",
    "optim.warmup_updates": "lr_warmup_steps warmup_steps",
    "optim.epochs": "ppo_epochs num_iterations",
    "run.updates": "num_train_epochs total_epochs max_steps total_training_steps steps",
    "optim.minibatch_samples": "ppo_mini_batch_size mini_batch_size gradient_accumulation_steps",
    "optim.micro_batch_tokens": "per_device_train_batch_size ppo_max_token_len_per_gpu",
    "optim.name": "optim optimizer",
    "rollout.group_size": "num_generations n",
    "rollout.tasks": "train_batch_size",
    "rollout.max_response_tokens": "max_completion_length max_response_length max_new_tokens "
    "response_length",
    "rollout.max_prompt_tokens": "max_prompt_length prompt_length",
    "engine.type": "use_vllm",
    "engine.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "run.dir": "output_dir default_local_dir",
    "run.name": "run_name experiment_name",
    "run.trackers": "report_to logger",
    "tracking.project": "project_name wandb_project",
    "run.save_every": "save_steps save_freq",
    "run.keep": "save_total_limit",
    "eval.every": "eval_steps test_freq",
    "eval.attempts": "samples num_samples num_trials rollouts_per_example val_kwargs.n",
    "policy.kl_coef": "beta kl_loss_coef",
    "policy.entropy_coef": "entropy_coeff",
    "policy.clip_low": "epsilon epsilon_low clip_ratio clip_ratio_low",
    "policy.clip_high": "epsilon_high clip_ratio_high",
    "policy.dual_clip": "clip_ratio_c delta",
    "policy.loss_norm": "loss_type loss_agg_mode",
    "rollout.ahead": "max_async_level async_level",
    "policy.tis_cap": "vllm_importance_sampling_cap rollout_is_threshold",
    "policy.importance_mask": "rollout_rs rollout_rs_threshold rollout_rs_threshold_lower",
    "engine.urls": "vllm_server_base_url",
    "engine.tensor_parallel": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "advantage.type": "adv_estimator",
    "advantage.norm_std": "scale_rewards norm_adv_by_std_in_grpo",
    "critic.value_clip": "cliprange_value",
    "model.path": "model_name_or_path model_name model_id",
    "model.checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.targets": "lora_target_modules target_modules",
    "env.name": "env_name",
}
"""Our key -> its names in TRL (GRPOConfig) and verl."""
FORMER_KEYS = {
    "advantage.estimator": "advantage.type",
    "advantage.gigpo_norm": "advantage.norm_std",
    "agent.kind": "agent.type",
    "critic.gamma": "advantage.gamma",
    "critic.lam": "advantage.lam",
    "model.gradient_checkpointing": "model.checkpointing",
    "optim.clip": None,
    "optim.minibatch_rows": "optim.minibatch_samples",
    "policy.is_level": "policy.importance_level",
    "policy.is_mask": "policy.importance_mask",
    "policy.verl_rows": "policy.verl_samples",
    "rollout.engine": "engine.type",
    "rollout.gpu_memory_utilization": "engine.gpu_memory_utilization",
    "rollout.max_batch_tokens": "engine.max_batch_tokens",
    "rollout.sleep_level": "engine.sleep_level",
    "rwml.embedding": "env.embedding",
    "rwml.threshold": "env.threshold",
    "rwml.triplets": "env.triplets",
    "search": "env",
    "simulator": "env.simulator",
    "tau2": "env",
    "webshop": "env",
    "wm.balance": None,
    "wm.grad_norms": None,
    "wm.horizon": None,
    "wm.ratio": None,
}
"""Key or section of an earlier version -> its current name, or None if it was removed."""
COMMANDS_SECTIONS = ("sft.", "rwml.")
"""Beginnings of the keys of commands other than `paw train`."""


def unknown_key(key: str, flat: Flat, *, origin: str, dashes: str = "") -> UserError:
    """Return the error for a key that is unknown, or that does not apply with the other keys of
    `flat`.

    `origin` says where it was set. `dashes` is what precedes it there.
    """
    return UserError(f"{origin}: unknown key '{dashes}{clean(key)}'{hint(key, flat)}")


def hint(key: str, flat: Flat) -> str:
    """Say what was probably meant, as the end of an error message; "" if no key is similar.

    It tries, in this order: what a known key needs to apply; the new name of a former key; the
    plug-in that has the key; our key for a name of TRL or verl; the key of that name in another
    section; the nearest name in the section; the plug-in of another section with a key of that
    name. If there is no such section, it takes the nearest of all keys.
    """
    list_name, _, entry_key = key.partition(".")
    if list_name in ENTRIES and entry_key:
        return _entry_hint(ENTRIES[list_name], entry_key, flat)

    keys = keys_of(Config, flat)
    if key in keys and keys[key].needs:
        return f"; it needs {keys[key].needs}"
    section, _, leaf = key.rpartition(".")
    if key in FORMER_KEYS:
        return _former(FORMER_KEYS[key])
    if FORMER_KEYS.get(section):
        return _former(f"{FORMER_KEYS[section]}.{leaf}")

    choices = [choice for choice, own_keys in plugin_keys(section) if key in own_keys]
    if choices:
        return f"; {_have(choices)} it"
    for our_key, their_names in SYNONYMS.items():
        if leaf in their_names.split():
            return f"; it is '{our_key}' here"

    namesakes = [other_key for other_key in keys if other_key.rpartition(".")[2] == leaf]
    if namesakes:
        of_training = [
            other_key for other_key in namesakes if not other_key.startswith(COMMANDS_SECTIONS)
        ]
        return f"; {nearest(key, of_training or namesakes, cutoff=0.0)}"

    applying = [other_key for other_key, state in keys.items() if not state.needs]
    return _nearest_hint(key, applying)


def _nearest_hint(key: str, keys: Collection[str]) -> str:
    """Return the hint for a key whose name no key of the chosen plug-ins has.

    In a section that exists, or nearly so, names are compared without it: most of two keys of the
    same long section is equal, however much their names differ.
    """
    written, _, name = key.partition(".")
    (section,) = get_close_matches(written[:255], Config.model_fields, n=1) or [written]
    if section in Config.model_fields and not name:
        return f"; did you mean the section [{section}]?"
    names = [other.removeprefix(f"{section}.") for other in keys if other.startswith(f"{section}.")]
    longer = [other for other in names if name and other.startswith(name)]
    matches = longer or get_close_matches(name[:255], names, n=1)
    if matches:
        return f"; did you mean '{section}.{matches[0]}'?"
    if section != written or not names:
        suggestion = nearest(key, keys, cutoff=0.5)
        return f"; {suggestion}" if suggestion else ""

    for other_section in Config.model_fields:
        other_key = f"{other_section}.{name}"
        choices = [choice for choice, own in plugin_keys(other_section) if other_key in own]
        if choices:
            return f"; {_have(choices)} '{other_key}'"
    base = _plugin_section(section)
    return (
        f"; [{section}] has no key like it, nor has a built-in {section}.{base.KEY}" if base else ""
    )


def _have(choices: list[str]) -> str:
    """Join the choices as the subject of a sentence.

    >>> _have(["agent.type = 'react'", "agent.type = 'reflexion'"])
    "agent.type = 'react' and agent.type = 'reflexion' have"
    """
    return f"{' and '.join(choices)} {'has' if len(choices) == 1 else 'have'}"


def _entry_hint(kind: type[Entry], entry_key: str, flat: Flat) -> str:
    """Return the hint for a key of an entry, from that for the key of a single plug-in."""
    label, _, leaf = entry_key.partition(".")
    prefix = f"{kind.LIST}.{label}."
    inner_key = leaf.partition(".")[0]
    if inner_key != leaf and inner_key in (*kind.SECTIONS, *kind.LISTS):
        table = entry_of(kind, flat.get(kind.LIST), label)
        text = hint(leaf, flatten({inner_key: table.get(inner_key)}))
        return re.sub(rf"\b{inner_key}\.", f"{prefix}{inner_key}.", text)
    if nearest(leaf, kind.own_keys()):
        return f"; {nearest(f'{prefix}{leaf}', [f'{prefix}{key}' for key in kind.own_keys()])}"
    table = entry_of(kind, flat.get(kind.LIST), label)
    keys = flatten({key: value for key, value in table.items() if key not in kind.own_keys()})
    as_single = {f"{kind.SECTION}.{key}": value for key, value in keys.items()}
    text = hint(f"{kind.SECTION}.{leaf}", as_single)
    return re.sub(rf"\b{kind.SECTION}\.", prefix, text)


def _former(new_key: str | None) -> str:
    return f"; it is '{new_key}' now" if new_key else "; it was removed"


def plugin_keys(section: str) -> Iterator[tuple[str, set[str]]]:
    """("env.name = 'webshop'", its own keys) of each built-in plug-in of a section, or of the
    section that it is within.

    Imports all of them. Those that are losses load torch, which takes seconds.
    """
    name, _, _ = section.partition(".")
    base = _plugin_section(name)
    if base is None:
        return
    for plugin in built_in(base):
        own_keys = {key for key, _, _ in own_fields(name, base, plugin)}
        yield f"{name}.{base.KEY} = '{plugin}'", own_keys


def _plugin_section(name: str) -> type[PluginSection] | None:
    """Return the section of that name if it names a plug-in, otherwise None."""
    field = Config.model_fields.get(name)
    base: Any = field.annotation if field and name not in LISTS else None
    return base if base is not None and issubclass(base, PluginSection) else None
