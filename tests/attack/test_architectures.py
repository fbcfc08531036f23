"""Models that cannot be trained. Whatever they raise, `paw doctor` and `paw train` give the reason
in one line."""

import pytest
import torch
from test_models import EXPERTS, SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from paw.errors import UserError
from paw.model.check import check_model, logp_difference
from paw.model.loading import load_policy
from paw.rollouts.engines.generation import check_sampling

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 48}
OWN_CODE = "it mixes tokens with its own code (attention sinks, ALiBi, recurrence, ...)"
BOUNDS = "its layers do not tell attention where rows end, so packed rows see each other"
ANEW = "it does not restart at each row: positions continue, or rows see each other"
SINGLE = {
    "layers_block_type": ["mamba", "hybrid"],
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_ngroups": 1,
    "mamba_headdim": 8,
    "num_mem_blocks": 1,
}
REFUSED = {
    "zamba2": (
        SINGLE,
        "packed rows do not go through it (IndexError: index_copy_(): Number of indices",
    ),
    "gpt_oss": (EXPERTS | {"num_local_experts": 4}, OWN_CODE),
    "mamba": ({"state_size": 8}, OWN_CODE),
    "mamba2": ({"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}, OWN_CODE),
    "gptj": (GPT2 | {"rotary_dim": 8}, OWN_CODE),
    "codegen": (GPT2 | {"rotary_dim": 8}, OWN_CODE),
    "bloom": ({"n_layer": 2, "n_head": 4}, OWN_CODE),
    "stablelm": ({}, BOUNDS),
    "nemotron": ({}, BOUNDS),
    "falcon": (
        {"alibi": False},
        "its attention is the model's own code, in which packed rows see each other",
    ),
    "bart": (
        {"d_model": 32, "decoder_ffn_dim": 48, "decoder_attention_heads": 4, "decoder_layers": 2},
        ANEW,
    ),
}


def write(folder, kind, **settings):
    """A small random model of this type, with two layers, the sizes in `SIZES` that it has, and
    `settings`."""
    defaults = AutoConfig.for_model(kind)
    sizes = {}
    for key, value in SIZES.items():
        is_derived = isinstance(getattr(type(defaults), key, None), property)
        if hasattr(defaults, key) and not is_derived:
            sizes[key] = value
    config = AutoConfig.for_model(kind, **sizes | {"num_hidden_layers": 2} | settings)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_one_line_with_the_reason(tmp_path, kind):
    settings, reason = REFUSED[kind]
    folder = write(tmp_path, kind, **settings)
    with pytest.raises(UserError) as error:
        load_policy(folder)
    message = str(error.value)
    assert message.startswith(
        f"model.path = '{folder}': model type '{kind}' cannot be trained here: "
    )
    assert reason in message
    assert "\n" not in message
    assert "request" not in message


def test_commands_say_in_one_line_why_a_model_cannot_be_trained(tmp_path, tiny_llm, paw_here):
    model = write(tiny_llm(tmp_path / "model"), "zamba2", **SINGLE)
    finished = paw_here("doctor", "--model", model, code=1)
    reason = (
        "model type 'zamba2' cannot be trained here: packed rows do not go through it (IndexError"
    )
    assert f"PROBLEM               {reason}" in finished.stdout
    assert finished.stdout.endswith("cannot be trained as it is\n")
    finished = paw_here(
        "train",
        "quickstart",
        {"model.path": model, "run.dir": tmp_path, "env.data": "none"},
        code=2,
    )
    assert finished.stderr.startswith(f"paw: model.path = '{model}': {reason}")
    assert finished.stderr.count("\n") == 1
    write(tiny_llm(tmp_path / "other"), "mamba", state_size=8)
    finished = paw_here("doctor", "--model", tmp_path / "other", code=2)
    assert "model type 'mamba' cannot be trained here" in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_a_model_that_is_not_a_causal_one_is_named(tmp_path):
    AutoConfig.for_model(
        "t5", d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4
    ).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"model type 't5' is not a causal language model of transformers$"
    ):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    "raised",
    [IndexError, KeyError, ZeroDivisionError, NotImplementedError, RecursionError, EOFError],
)
def test_whatever_a_check_raises_is_one_line(tmp_path, raised, monkeypatch):
    policy = load_policy(write(tmp_path, "llama"))

    def forward(*args, **options):
        raise raised("its own\n\x1b[2Jreason")

    monkeypatch.setattr(policy.lm.model.layers[1].mlp, "forward", forward)
    reason = (
        "model type 'llama' cannot be trained here: packed rows do not go through it "
        rf"\({raised.__name__}: .*its own"
    )
    with pytest.raises(UserError, match=reason) as error:
        check_model(policy, "here")
    assert str(error.value).isprintable()
    with pytest.raises(
        UserError, match=rf"cannot sample from model type 'llama': {raised.__name__}"
    ):
        check_sampling(policy.lm)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_dropout_of_the_layers_themselves_stays_off_when_they_are_recomputed(
    tmp_path, checkpointing
):
    """OPT's layers apply dropout themselves instead of through a module."""
    opt_settings = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.5, "init_std": 0.15}
    policy = load_policy(write(tmp_path, "opt", **opt_settings), checkpointing=checkpointing)
    assert logp_difference(policy, [17, 1, 30]).max() < 2e-5
