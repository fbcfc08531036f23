"""The policy: hidden states and head of any causal LM, and one line for a model that cannot be
loaded."""

import io
import json
import shutil
from contextlib import suppress

import pytest
import torch
from joint import (
    FAMILIES,
    VOCAB,
    Objective,
    gradients,
    make_lm,
    make_rows,
    packed,
    relative,
    tiny_policy,
)
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, PhiConfig, PhiForCausalLM

from paw.algo.loss import log_probs
from paw.algo.packing import Packing
from paw.errors import UserError
from paw.model.loading import load_policy, load_tokenizer
from paw.model.policy import Policy, pick_backend, pick_device
from paw_kernels import BACKENDS


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_lm("qwen2-untied").save_pretrained(folder)
    return folder


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of the saved model to be broken."""
    return shutil.copytree(saved, tmp_path / "broken")


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def without_norm(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def only_pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


BREAKS = {
    "no config": (lambda f: (f / "config.json").unlink(), "there is no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "not a valid JSON"),
    "not a causal LM": (
        lambda f: rewrite(f, model_type="clip"),
        "model type 'clip' is not a causal language model",
    ),
    "a setting of a wrong type": (lambda f: rewrite(f, hidden_size="x"), "hidden_size"),
    "no heads": (lambda f: rewrite(f, num_attention_heads=0), "zero"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-9]
        ),
        "not fully covered",
    ),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "header too small"),
    "unknown architecture": (lambda f: rewrite(f, model_type="nonesuch"), "nonesuch"),
    "code of its own": (
        lambda f: rewrite(f, model_type="mine", auto_map={"AutoConfig": "mine.Mine"}),
        "its files point to custom code (auto_map), which PaW never runs",
    ),
    "pickled weights alone": (only_pickled, "model.safetensors"),
    "garbage": (
        lambda f: (f / "model.safetensors").write_bytes(b"garbage" * 99),
        "header too large",
    ),
    "a missing tensor": (
        without_norm,
        "1 weights are missing from its files, the first is 'model.norm.weight'",
    ),
    "other shapes": (
        lambda f: rewrite(f, hidden_size=64),
        "has shape [61, 32] in its files, [61, 64] in its config",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_model_is_a_users_error_of_one_line(broken, capfd, name):
    damage, reason = BREAKS[name]
    damage(broken)
    with pytest.raises(UserError) as caught:
        load_policy(broken)
    message = str(caught.value)
    assert message.startswith(f"model.path = '{broken}': ")
    assert reason in message
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")  # no load report around the line


def test_code_in_a_model_folder_is_never_run(broken, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # an answer for whoever asks
    marker = broken / "was-run"
    (broken / "mine.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Mine: pass\n")
    for kind in ("mine", "qwen2"):  # qwen2: its own code instead
        autos = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
        rewrite(broken, model_type=kind, auto_map={auto: "mine.Mine" for auto in autos})
        (broken / "tokenizer_config.json").write_text(
            '{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'
        )
        for load in (load_policy, load_tokenizer):
            with suppress(UserError):
                load(broken)
            assert not marker.exists()


def test_a_file_or_an_empty_folder_is_no_model(saved, tmp_path):
    for path in (saved / "config.json", tmp_path):
        for load in (load_policy, load_tokenizer):
            with pytest.raises(UserError, match=r"there is no config\.json"):
                load(path)


def test_a_broken_tokenizer_is_a_users_error(broken):
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no tokenizer found"):
        load_tokenizer(broken)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_with_its_weights(family, tmp_path):
    lm = make_lm(family)
    lm.save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    original = Policy(lm)
    ids = torch.randint(VOCAB, (18,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = policy.hidden(ids, [9, 9])
        assert torch.equal(hidden, original.hidden(ids, [9, 9]))
        assert torch.allclose(
            hidden @ policy.head_weight.T,
            lm(input_ids=ids.view(2, 9)).logits.flatten(0, 1),
            atol=1e-6,
        )
    assert policy.head_bias is None
    assert policy.lm.num_parameters() == sum(parameter.numel() for parameter in lm.parameters())
    names = policy.named_parameters_once()
    assert ("lm_head.weight" in names) is not FAMILIES[family][2]
    assert "model.embed_tokens.weight" in names
    other = tiny_policy(family, seed=1)
    policy.load(
        {name: parameter.detach() for name, parameter in other.named_parameters_once().items()}
    )
    assert all(
        torch.equal(left, right)
        for left, right in zip(policy.parameters(), other.parameters(), strict=True)
    )


def test_a_head_with_a_bias_is_read():
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    lm = PhiForCausalLM(PhiConfig(**sizes, max_position_embeddings=64))
    lm.lm_head.bias.data.normal_()
    policy = Policy(lm)
    ids = torch.tensor([1, 2, 3])
    with torch.no_grad():
        logits = policy.hidden(ids, [3]) @ policy.head_weight.T + policy.head_bias
        assert torch.allclose(logits, lm(input_ids=ids[None]).logits[0], atol=1e-5)


@pytest.mark.parametrize(("family", "checkpointing"), [("qwen2-tied", "none"), ("llama", "full")])
def test_bfloat16_is_that_of_a_model_stored_in_it(family, checkpointing):
    """Whatever the optimizer stores: with weights in bfloat16 the residual stream is not
    float32, as under autocast."""
    small_weights = {"initializer_range": 0.05}
    policy = Policy(make_lm(family, **small_weights), dtype="bfloat16", checkpointing=checkpointing)
    stored = make_lm(family, **small_weights)
    exact_policy = tiny_policy(family, **small_weights)
    for parameter in stored.parameters():
        parameter.data = parameter.data.bfloat16()
    stored_policy = Policy(stored, dtype="bfloat16", checkpointing=checkpointing)
    ids = torch.arange(1, 12)
    assert torch.equal(policy.hidden(ids, [5, 6]), stored_policy.hidden(ids, [5, 6]))
    assert torch.equal(policy.lm(input_ids=ids[None]).logits, stored(input_ids=ids[None]).logits)
    rows = make_rows(exact_policy)
    objective = Objective(wm="ce")
    gradient, plain_gradient, exact_gradient = (
        packed(p, rows, objective, update_samples=len(rows))[1]
        for p in (policy, stored_policy, exact_policy)
    )
    assert (
        relative(gradient, plain_gradient) < 0.01
    )  # the sums of gradients are of bfloat16 in the other
    assert 0 < relative(gradient, exact_gradient) < 0.02
    scores = (
        log_probs(p, rows, Packing(budget=99), temperature=1.0).values()
        for p in (policy, exact_policy)
    )
    for (logps, _), (exact_logps, _) in zip(*scores, strict=True):
        assert logps == pytest.approx(exact_logps, abs=0.02)
        assert logps.tolist() != exact_logps.tolist()
    assert policy.hidden(ids, [5, 6]).dtype == policy.head_weight.dtype == torch.bfloat16
    policy.hidden(ids, [5, 6]).sum().backward()
    assert all(p.dtype == torch.float32 and p.is_leaf for p in policy.parameters())
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in policy.parameters())


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_dropout_is_off_whatever_the_config_says(checkpointing):
    torch.manual_seed(0)
    lm = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5
        )
    )
    policy = Policy(lm, checkpointing=checkpointing)
    ids = torch.tensor([1, 2, 3, 4])
    first = policy.hidden(ids, [4])
    assert torch.equal(first, policy.hidden(ids, [4]))
    first.sum().backward()
    assert gradients(policy).norm() > 0


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"model\.device = 'cuda'"):
            pick_device("cuda")
        with pytest.raises(
            UserError, match=r"model.head_backend = 'cuda': it needs tensors.*head_backend auto"
        ):
            pick_backend("cuda", torch.device("cpu"), "float32")
        assert pick_backend("auto", torch.device("cpu"), "float32") in BACKENDS
