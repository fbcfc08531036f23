"""What was meant by a key that no configuration has. Imported when there is one."""

from collections.abc import Iterator
from typing import Any

from paw.config import Config
from paw.errors import UserError, clean, nearest
from paw.keys import Flat, built_in, keys_of, own_fields

SYNONYMS = {
    "optim.lr": "actor_lr learning_rate", "optim.betas": "adam_beta1 adam_beta2",
    "optim.grad_clip": "max_grad_norm clip_grad", "optim.schedule": "lr_scheduler_type",
    "optim.warmup_updates": "lr_warmup_steps warmup_steps", "optim.epochs": "ppo_epochs num_iterations",
    "run.updates": "num_train_epochs total_epochs max_steps total_training_steps steps",
    "optim.minibatch_samples": "ppo_mini_batch_size mini_batch_size gradient_accumulation_steps",
    "optim.micro_batch_tokens": "per_device_train_batch_size ppo_max_token_len_per_gpu",
    "optim.name": "optim optimizer", "rollout.group_size": "num_generations n", "rollout.tasks": "train_batch_size",
    "rollout.max_response_tokens": "max_completion_length max_response_length max_new_tokens response_length",
    "rollout.max_prompt_tokens": "max_prompt_length prompt_length", "engine.type": "use_vllm",
    "engine.gpu_memory_utilization": "vllm_gpu_memory_utilization", "run.dir": "output_dir default_local_dir",
    "run.name": "run_name experiment_name", "run.trackers": "report_to logger",
    "tracking.project": "project_name wandb_project",
    "run.save_every": "save_steps save_freq", "run.keep": "save_total_limit", "eval.every": "eval_steps test_freq",
    "policy.kl_coef": "beta kl_loss_coef", "policy.entropy_coef": "entropy_coeff",
    "policy.clip_low": "epsilon epsilon_low clip_ratio clip_ratio_low",
    "policy.clip_high": "epsilon_high clip_ratio_high", "policy.dual_clip": "clip_ratio_c delta",
    "policy.loss_norm": "loss_type loss_agg_mode", "rollout.ahead": "max_async_level async_level",
    "policy.tis_cap": "vllm_importance_sampling_cap rollout_is_threshold", "engine.urls": "vllm_server_base_url",
    "engine.tensor_parallel": "vllm_tensor_parallel_size tensor_model_parallel_size", "advantage.type": "adv_estimator",
    "advantage.norm_std": "scale_rewards norm_adv_by_std_in_grpo", "critic.value_clip": "cliprange_value",
    "model.path": "model_name_or_path model_name model_id",
    "model.checkpointing": "gradient_checkpointing enable_gradient_checkpointing", "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha", "lora.targets": "lora_target_modules target_modules", "env.name": "env_name",
}  # fmt: skip
"""Our key -> its names in TRL (GRPOConfig) and verl."""


def unknown_key(key: str, flat: Flat, *, origin: str, dashes: str = "") -> UserError:
    """The error of a key that is unknown, or does not apply beside the others of `flat`."""
    return UserError(f"{origin}: unknown key '{dashes}{clean(key)}'{hint(key, flat)}")


def hint(key: str, flat: Flat) -> str:
    """What was meant, as the end of a line, or "": which choice has it, the nearest.

    A right name in the wrong section comes before a similar one.
    """
    keys, leaf = keys_of(Config, flat), key.rpartition(".")[2]
    if (found := keys.get(key)) and found.needs:
        return f"; it needs {found.needs}"
    if others := [choice for choice, own in plugin_keys() if key in own]:
        return f"; {' and '.join(others)} has it"
    for ours, theirs in SYNONYMS.items():
        if leaf in theirs.split():
            return f"; it is '{ours}' here"
    namesakes = [known for known in keys if known.rpartition(".")[2] == leaf]
    applying = [known for known, found in keys.items() if not found.needs]
    trained = [
        known for known in namesakes if not known.startswith(("sft.", "rwml."))
    ]  # not of other commands
    near = nearest(key, trained or namesakes or applying, cutoff=0.0 if namesakes else 0.5)
    return f"; {near}" if near else ""


def plugin_keys() -> Iterator[tuple[str, set[str]]]:
    """("env.name = 'webshop'", its own keys) of each built-in plug-in. Imports them all."""
    for section, field in Config.model_fields.items():
        base: Any = field.annotation
        for name in built_in(base):
            yield (
                f"{section}.{base.KEY} = '{name}'",
                {key for key, _, _ in own_fields(section, base, name)},
            )
