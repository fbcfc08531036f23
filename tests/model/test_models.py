"""Every architecture: trained and sampled from with its own log-probs, or refused by name.

Tiny random models.
"""

from pathlib import Path

import pytest
import torch
import transformers
from joint import Objective, make_rows, packed, relative
from test_chat import thinker
from test_engines import END, assert_same, make_requests, naive, run

from paw.errors import UserError
from paw.model.check import check_model, check_path, logp_difference
from paw.model.loading import load_policy
from paw.model.policy import Policy
from paw.rollouts.engines.generation import check_sampling
from paw.rollouts.engines.transformers import TransformersEngine

VOCAB = 61
GUESS = Path(__file__).parents[2] / "examples" / "number_game.py"
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=END,
)
DELTA_NET = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=4,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1)
KNOWN = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": dict(tie_word_embeddings=True),
    "Gemma2": dict(
        query_pre_attn_scalar=8,
        sliding_window=8,
        final_logit_softcapping=2.0,
        attn_logit_softcapping=1.0,
    ),
    "Gemma3": dict(
        sliding_window=8,
        final_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "NanoChat": dict(final_logit_softcapping=2.0),
    "Granite": dict(logits_scaling=8.0),
    "Cohere": dict(logit_scale=0.2),
    "Cohere2": dict(
        logit_scale=0.2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "FalconH1": dict(
        lm_head_multiplier=0.3, mamba_d_ssm=32, mamba_chunk_size=8, **MAMBA | dict(mamba_n_heads=4)
    ),
    "Qwen3_5": DELTA_NET,
    "Qwen3Next": DELTA_NET | EXPERTS | dict(shared_expert_intermediate_size=16),
    "OlmoHybrid": DELTA_NET,
    "Lfm2": dict(layer_types=["conv", "full_attention"]),
    "GraniteMoeHybrid": dict(
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        shared_intermediate_size=16,
        **MAMBA,
    ),
    "Qwen3Moe": EXPERTS,
    "Mixtral": {},
    "Olmo2": {},
    "Phi3": {},
}
SLOW = ("FalconH1", "Qwen3_5", "Qwen3Next", "OlmoHybrid", "GraniteMoeHybrid")
RECURRENT = [pytest.mark.slow]
SAMPLED = ("NanoChat", "Granite", "Cohere", "FalconH1", "Qwen3_5", "Lfm2", "Mixtral")
"""One for each head and each cache."""


def make(name, **settings):
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(
        transformers, f"{name}Config"
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(
        config(**SIZES | KNOWN.get(name, {}) | settings)
    ).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=RECURRENT * (name in SLOW)) for name in KNOWN]
)
def test_packed_rows_have_the_models_own_log_probs_and_gradients(name):
    policy = Policy(make(name))
    assert check_model(policy, "here") < 2e-5
    assert logp_difference(policy, [17, 1, 17, 30, 2]).max() < 2e-5
    rows = make_rows(policy, n=6)
    objective = Objective(wm="ce", temperature=0.7)
    together = packed(policy, rows, objective, update_samples=len(rows), budget=10**6)[1]
    alone = packed(policy, rows, objective, update_samples=len(rows), budget=1)[1]
    assert relative(together, alone) < 1e-4


@pytest.mark.parametrize("name", KNOWN)
def test_bfloat16_weights_are_checked_in_float32_and_left_as_they_were(name):
    lm = make(name).to(torch.bfloat16)
    before = {key: value.clone() for key, value in lm.named_parameters()}
    policy = Policy(lm, dtype="bfloat16")
    assert check_model(policy, "here") < 2e-5
    for key, value in policy.lm.named_parameters():
        assert value.dtype == torch.bfloat16, key
        assert torch.equal(value, before[key]), key
    check_path(policy, "here")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=RECURRENT * (name in SLOW)) for name in SAMPLED]
)
def test_the_transformers_engine_samples_from_them(name):
    lm = make(name)
    requests = make_requests(8)
    engine = TransformersEngine(lm, end_ids={END})
    assert check_sampling(lm) < 2e-5
    for completion, request in zip(run(engine, requests), requests, strict=True):
        assert_same(completion, naive(lm, request, {END}))


REFUSED = {
    "Bloom": "model type 'bloom' cannot be trained here: log-probs of packed rows are off by 0",
    "GptOss": "model type 'gpt_oss' cannot be trained here: log-probs",  # attention sinks
    "MiniMax": "model type 'minimax' has layers of type linear_attention",
    "Llama4": "model type 'llama4_text' has layers of type chunked_attention",
    "RecurrentGemma": "model type 'recurrent_gemma'",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(name):
    settings = {"GptOss": dict(num_local_experts=4), "RecurrentGemma": dict(lru_width=32)}.get(
        name, {}
    )
    lm = make(name, **settings)
    for key, parameter in lm.named_parameters():
        if "sinks" in key:
            torch.nn.init.normal_(parameter)
    with pytest.raises(UserError, match=f"model.path = 'here': {REFUSED[name]}"):
        check_model(Policy(lm), "here")


def test_a_head_that_does_more_than_we_know_is_refused_at_load(tmp_path):
    lm = make("Cohere")
    lm.save_pretrained(tmp_path)
    assert load_policy(tmp_path).transform.scale == 0.2
    policy = Policy(lm)
    lm.logit_scale = 0.25  # as a model would whose config calls it otherwise
    with pytest.raises(
        UserError, match=r"model type 'cohere' cannot be trained here.*beyond rounding \(0\.001\)"
    ):
        check_model(policy, "here")


def test_an_engine_that_samples_from_something_else_is_refused():
    # Its cache is not the one we give it.
    lm = make("Mamba2", num_heads=8, n_groups=1, state_size=8)
    with pytest.raises(
        UserError,
        match=r"'transformers' cannot sample from model type 'mamba2'.*use --engine.type v",
    ):
        check_sampling(lm)
    lm = make("Bamba", attn_layer_indices=[], **MAMBA)  # nor has it attention
    with pytest.raises(
        UserError,
        match=r"'transformers' cannot sample from model type 'bamba': .*Error: .*use --eng",
    ):
        check_sampling(lm)


@pytest.mark.parametrize("name", ["Mistral", "Phi3"])
def test_a_window_of_all_layers_is_trained_and_sampled_from_within_it(name):
    lm = make(name, sliding_window=24)
    assert check_model(Policy(lm), "here") < 2e-5
    assert logp_difference(Policy(lm), [40, 70]).max() < 2e-5
    TransformersEngine(lm, end_ids={END}, longest=24)
    with pytest.raises(UserError, match=r"has sliding_attention layers: use --engine.type vllm"):
        TransformersEngine(lm, end_ids={END}, longest=25)


@pytest.mark.parametrize("name", ["Qwen2Moe", "Phimoe"])
def test_windows_by_a_mask_alone_are_refused_where_a_row_may_be_longer(name):
    settings = EXPERTS | dict(
        use_sliding_window=True, max_window_layers=2, sliding_window=24, num_local_experts=4
    )
    policy = Policy(make(name, **settings))
    for longest in (0, 25):
        with pytest.raises(UserError, match="applies sliding windows only through a mask"):
            check_model(policy, "here", longest)
    check_model(policy, "here", 24)
    assert logp_difference(policy, [24, 20]).max() < 2e-5 < logp_difference(policy, [40]).max()


LONGROPE = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4)


@pytest.mark.parametrize(
    ("name", "rope"), [("Phi3", LONGROPE), ("Llama", dict(rope_type="dynamic", factor=2.0))]
)
def test_frequencies_that_the_longest_row_would_choose_are_refused(tmp_path, name, rope):
    original = dict(original_max_position_embeddings=48)
    lm = make(
        name,
        max_position_embeddings=48,
        rope_parameters=dict(rope_theta=1e4) | original | rope,
        **original,
    )
    lm.save_pretrained(tmp_path)
    load_policy(tmp_path, longest=48)
    for empty in (False, True):
        with pytest.raises(
            UserError,
            match=f"rotary frequencies .{rope['rope_type']}. beyond 48 tokens, and rows may",
        ):
            load_policy(tmp_path, longest=49, empty=empty)


def test_what_hugging_face_refuses_is_one_line(tmp_path):
    sizes = dict(
        vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, global_head_dim=16
    )
    make("Gemma4", **sizes).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match="model type 'gemma4_text' cannot be trained here: 'head_dim' is"
    ) as error:
        load_policy(tmp_path)
    assert "\n" not in str(error.value)


def test_rows_stay_apart_when_layers_are_recomputed():
    plain = Policy(make("Qwen3_5"))
    thrifty = Policy(make("Qwen3_5"), checkpointing="full")
    rows = make_rows(plain, n=6)
    plain_pass, thrifty_pass = (
        packed(policy, rows, Objective(), update_samples=len(rows)) for policy in (plain, thrifty)
    )
    assert plain_pass[0] == thrifty_pass[0]
    assert relative(thrifty_pass[1], plain_pass[1]) < 1e-6


@pytest.mark.slow
def test_qwen3_5_trains_with_its_own_template(paw_here, read_metrics, tmp_path):
    tokenizer = thinker()
    end_tokens = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    lm = make("Qwen3_5", vocab_size=len(tokenizer), max_position_embeddings=2048, **end_tokens)
    for part in (lm, tokenizer):
        part.save_pretrained(tmp_path / "model")
    sizes = {
        "rollout.tasks": 2,
        "rollout.group_size": 2,
        "eval.games": 2,
        "rollout.max_response_tokens": 8,
    }
    places = {
        "model.path": tmp_path / "model",
        "env.name": f"{GUESS}:Guess",
        "run.dir": tmp_path,
        "run.name": "run",
    }
    run = {"model.dtype": "bfloat16", "run.updates": 1, "run.threads": 1}
    paw_here(
        "train",
        "quickstart",
        sizes,
        places,
        run,
        {"model.chat_template_kwargs.enable_thinking": "false"},
    )
    line = read_metrics(tmp_path / "run")[-1]
    assert line["optim/grad_norm"] > 0
    assert line["wm/loss"] > 0
    assert line["health/sampler_mismatch_mean"] < 0.01
    exported = (tmp_path / "run" / "hf" / "chat_template.jinja").read_text()
    assert exported.startswith("{%- set enable_thinking = false -%}")
