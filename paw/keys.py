"""Keys of a configuration: which apply, what they mean, and which one a wrong one was meant to be."""

import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from paw import plugins
from paw.errors import UserError
from paw.values import LONGEST_NAME, Only, PluginSection, Section

SYNONYMS = {
    "actor_lr": "optim.lr", "learning_rate": "optim.lr", "adam_beta1": "optim.betas", "adam_beta2": "optim.betas",
    "max_grad_norm": "optim.grad_clip", "clip_grad": "optim.grad_clip", "lr_scheduler_type": "optim.schedule",
    "lr_warmup_steps": "optim.warmup_updates", "warmup_steps": "optim.warmup_updates", "ppo_epochs": "optim.epochs",
    "num_iterations": "optim.epochs", "num_train_epochs": "run.updates", "total_epochs": "run.updates",
    "ppo_mini_batch_size": "optim.minibatch_samples", "mini_batch_size": "optim.minibatch_samples",
    "per_device_train_batch_size": "optim.micro_batch_tokens", "ppo_max_token_len_per_gpu": "optim.micro_batch_tokens",
    "gradient_accumulation_steps": "optim.minibatch_samples", "optim": "optim.name", "optimizer": "optim.name",
    "num_generations": "rollout.group_size", "n": "rollout.group_size", "train_batch_size": "rollout.tasks",
    "max_completion_length": "rollout.max_response_tokens", "max_response_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens", "response_length": "rollout.max_response_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens", "prompt_length": "rollout.max_prompt_tokens",
    "use_vllm": "rollout.engine", "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "max_steps": "run.updates", "total_training_steps": "run.updates", "steps": "run.updates",
    "output_dir": "run.dir", "default_local_dir": "run.dir", "run_name": "run.name", "experiment_name": "run.name",
    "report_to": "run.trackers", "logger": "run.trackers",
    "save_steps": "run.save_every", "save_freq": "run.save_every",
    "save_total_limit": "run.keep", "eval_steps": "eval.every", "test_freq": "eval.every",
    "beta": "policy.kl_coef", "kl_loss_coef": "policy.kl_coef", "entropy_coeff": "policy.entropy_coef",
    "epsilon": "policy.clip_low", "epsilon_low": "policy.clip_low", "epsilon_high": "policy.clip_high",
    "clip_ratio": "policy.clip_low", "clip_ratio_low": "policy.clip_low", "clip_ratio_high": "policy.clip_high",
    "clip_ratio_c": "policy.dual_clip", "delta": "policy.dual_clip", "loss_type": "policy.loss_norm",
    "loss_agg_mode": "policy.loss_norm", "adv_estimator": "advantage.type", "scale_rewards": "advantage.norm_std",
    "norm_adv_by_std_in_grpo": "advantage.norm_std", "cliprange_value": "critic.value_clip",
    "model_name_or_path": "model.path", "model_name": "model.path", "model_id": "model.path",
    "gradient_checkpointing": "model.checkpointing", "enable_gradient_checkpointing": "model.checkpointing",
    "lora_r": "lora.rank", "lora_rank": "lora.rank", "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.targets", "target_modules": "lora.targets", "env_name": "env.name",
}  # fmt: skip
"""Names of TRL (GRPOConfig) and verl -> our key."""
MOVED = {
    "advantage.estimator": "advantage.type", "optim.minibatch_rows": "optim.minibatch_samples",
    "policy.verl_rows": "policy.verl_samples", "agent.kind": "agent.type", "advantage.gigpo_norm": "advantage.norm_std",
    "critic.gamma": "advantage.gamma", "critic.lam": "advantage.lam",
    "rwml.triplets": "env.triplets", "rwml.embedding": "env.embedding", "rwml.threshold": "env.threshold",
    "webshop": "env", "search": "env", "tau2": "env", "simulator": "env.simulator",
}  # fmt: skip
"""Keys and sections of older versions -> where they are now."""
LEFT = {
    key: f"{key} was removed: it did not help where it was measured (docs/experiments.md)"
    for key in ("wm.balance", "wm.ratio", "wm.horizon", "optim.clip")
} | {"wm.grad_norms": "wm.grad_norms was removed: it cost a second backward pass"}


class Key(NamedTuple):
    """A key of a configuration."""

    field: FieldInfo
    needs: Only | None
    """What is lacking for it to apply."""


def section_type(base: type[Section], table: dict[str, Any]) -> type[Section]:
    """`base`, with the keys of the plug-in that the table names. Raises UserError where there is no such plug-in."""
    if not issubclass(base, PluginSection):
        return base
    name = table.get(base.KEY, base.model_fields[base.KEY].default)
    if not isinstance(name, str) or name in (base.NONE, *base.WITHIN):
        return base
    if target := plugins.SETTINGS.get(f"{base.KIND}.{name}"):
        return plugins.load(base.KIND, target)
    return plugins.settings(plugins.load(base.KIND, name), name, base)


def selectors_of(config: type[Section]) -> set[str]:
    """The keys that name a plug-in."""
    sections = {name: _section(field) for name, field in config.model_fields.items()}
    return {f"{name}.{made.KEY}" for name, made in sections.items() if issubclass(made, PluginSection)}


def keys_of(config: type[Section], tree: dict[str, Any]) -> dict[str, Key]:
    """Every dotted key of the sections that the tables choose, in order; of a plug-in that is not there, none."""
    types: dict[str, type[Section]] = {}
    for section, field in config.model_fields.items():
        base, table = _section(field), tree.get(section, {})
        types[section] = type(table) if isinstance(table, Section) else base
        if isinstance(table, dict):
            try:
                types[section] = section_type(base, table)
            except UserError:
                continue  # said when the section itself is validated
    return {
        dotted: Key(field, next((need for need in needs if not _holds(need, tree, types)), None))
        for section, made in types.items()
        for dotted, field, needs in _fields(section, made)
    }


def _section(field: FieldInfo) -> type[Section]:
    assert isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    return field.annotation


def _fields(prefix: str, section: type[Section]) -> Iterator[tuple[str, FieldInfo, list[Only]]]:
    """(dotted key, field, its `Only`s) of a section and of sections within it."""
    common = [section.ONLY] if section.ONLY else []
    for name, field in section.model_fields.items():
        needs = [*common, *(part for part in field.metadata if isinstance(part, Only))]
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            for dotted, leaf, more in _fields(f"{prefix}.{name}", inner):
                yield dotted, leaf, needs + more
        else:
            yield f"{prefix}.{name}", field, needs


def _holds(need: Only, tree: dict[str, Any], types: dict[str, type[Section]]) -> bool:
    section, leaf = need.key.split(".")
    if leaf not in types[section].model_fields:
        return True
    table, default = tree.get(section), types[section].model_fields[leaf].default
    value = table.get(leaf, default) if isinstance(table, dict) else getattr(table, leaf, default)
    return value in need.values if need.values else bool(value)


def hint(key: str, keys: dict[str, Key], config: type[Section]) -> str:
    """What was meant by an unknown key, as the end of a line, or "": where it went, which choice has it, the nearest.

    A right name in the wrong section comes before a similar one.
    """
    if key in LEFT:
        return f"; {LEFT[key]}"
    section, _, rest = key.partition(".")
    moved = MOVED.get(key) or (MOVED[section] + f".{rest}".rstrip(".") if section in MOVED else None)
    if moved:
        return f"; it is '{moved}' now"
    if (found := keys.get(key)) and found.needs:
        return f"; it needs {found.needs}"
    leaf = key.rpartition(".")[2]
    if others := [name for name, own in plugin_keys(config) if key in own]:
        return f"; {' and '.join(others)} has it"
    if leaf in SYNONYMS:
        return f"; it is '{SYNONYMS[leaf]}' here"
    names, key = [known for known, found in keys.items() if not found.needs], key[:LONGEST_NAME]
    namesakes = [known for known in keys if known.rpartition(".")[2] == leaf]
    near = difflib.get_close_matches(key, namesakes or names, n=1, cutoff=0.0 if namesakes else 0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def plugin_keys(config: type[Section]) -> Iterator[tuple[str, dict[str, FieldInfo]]]:
    """("env.name = 'webshop'", its own keys) of each built-in plug-in. Imports them all."""
    for section, field in config.model_fields.items():
        base: Any = _section(field)
        for name in _built_in(base):
            yield f"{section}.{base.KEY} = '{name}'", {key: field for key, field, _ in _own(section, base, name)}


def _built_in(base: Any) -> Iterable[str]:
    """The built-in plug-ins of a section that have keys beside its own."""
    return plugins.BUILT_IN[base.KIND] if issubclass(base, PluginSection) and not base.WITHIN else ()


def _own(section: str, base: Any, name: str) -> list[tuple[str, FieldInfo, list[Only]]]:
    """The keys that a built-in plug-in adds to its section."""
    common = {dotted for dotted, _, _ in _fields(section, base)}
    return [row for row in _fields(section, section_type(base, {base.KEY: name})) if row[0] not in common]


def meaning(field: FieldInfo) -> str:
    """A key's description and default, on one line."""
    return f"{_description(field)} (default: {_default(field)})"


def page(config: type[Section]) -> str:
    """docs/keys.md: every key of every section, those of the built-in plug-ins too."""
    lines = [
        "# Keys",
        "",
        "<!-- written by `paw keys > docs/keys.md` -->",
        "Every key of a recipe, and so of the command line: `[optim]` `lr = 5e-4`, or `--optim.lr 5e-4`.",
        "`paw train RECIPE --dry-run` prints them with the recipe's values.",
    ]
    for section, field in config.model_fields.items():
        base: Any = _section(field)
        own = "" if base.__doc__ == Section.__doc__ else " ".join((base.__doc__ or "").split())
        needs = [f"Only with `{base.ONLY}`."] if base.ONLY else []
        text = [" ".join([own, *needs]).strip()] if own or needs else []
        lines += ["", f"## {section}", *([""] if text else []), *text, *_table(_fields(section, base), base.ONLY)]
        for name in _built_in(base):
            if rows := _own(section, base, name):
                lines += ["", f'With `{section}.{base.KEY} = "{name}"`:', *_table(rows, base.ONLY)]
    return "\n".join(lines) + "\n"


def _table(rows: Iterable[tuple[str, FieldInfo, list[Only]]], known: Only | None) -> list[str]:
    lines = ["", "| key | takes | default | meaning |", "|---|---|---|---|"]
    for dotted, field, needs in rows:
        only = "".join(f" Only with `{need}`." for need in needs if need != known)
        takes = " or ".join(dict.fromkeys(_takes(field.annotation)))
        cells = (f"`{dotted}`", takes, f"`{_default(field)}`", _description(field) + only)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _description(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else _toml(field.get_default(call_default_factory=True))


def _takes(kind: Any) -> Iterator[str]:
    """What a key takes, in words, one for each alternative."""
    if get_origin(kind) is Literal:
        yield from (f"`{_toml(value)}`" for value in get_args(kind))
    elif get_origin(kind) in (list, tuple, dict):
        yield "table" if get_origin(kind) is dict else "list"
    elif hasattr(kind, "__metadata__"):  # Annotated
        yield from _takes(get_args(kind)[0])
    elif get_args(kind):  # a union
        for part in get_args(kind):
            yield from _takes(part)
    else:
        names = {str: "text", Path: "path", int: "integer", float: "number", bool: "`true` or `false`"}
        yield names.get(kind, "none")


def _toml(value: Any) -> str:
    return "none" if value is None else json.dumps(value, default=str, ensure_ascii=False)
