"""Where the world model's gradient lies: shares by hand, rules on real texts, p against full logits."""

import argparse
import csv
import json
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paw.errors import UserError
from paw.recipe import load
from paw.rollout.chat import Chat
from paw.tools.experiment import noise
from paw.tools.experiment.noise import Token, find_rule, household, measure, noisy, table, webshop
from paw.types import Outcome, Turn

PROMPT = "see:\nYou arrive at shelf 1. On the shelf 1, you see a mug 1.\ncan:\ntake mug 1 from shelf 1"
RESULTS = (
    "Instruction: [SEP] a mug [SEP] Page 1 (Total results: 2) [SEP] B09ABCDEF1 [SEP] Acme mug, blue [SEP] $9.99"
    " [SEP] B01ZZZZZZ9 [SEP] Other cup B0 [SEP] $5"
)
PRODUCT = "'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'red' [SEP] 'Acme mug, blue' [SEP] 'Price: $9.99'"


def marked(rule, observation, *, prompt="", action=""):
    return [observation[start:end] for start, end in rule(prompt, action, observation)]


def test_what_nobody_can_predict_is_noise():
    """In a household what lies in a place, unless the prompt shows it already; in a shop codes and titles."""
    for observation, expected in {
        "You arrive at shelf 2. On the shelf 2, you see a mug 1, and a pan 2.": ["a mug 1, and a pan 2"],
        "You open the fridge 1. The fridge 1 is open. In it, you see nothing.": ["nothing"],
        "You arrive at fridge 1. The fridge 1 is closed.": [],
        "You are facing the shelf 1. Next to it, you see nothing.": [],
        "On the shelf 1, you see a mug 1.": [],  # examined again: the prompt holds it
        "On the shelf 1, you see a mug 1, and a pan 2.": ["a mug 1, and a pan 2"],
        "Nothing happens.": [],
    }.items():
        assert marked(household, observation, prompt=PROMPT) == expected
    assert marked(webshop, RESULTS) == ["B09ABCDEF1", "Acme mug, blue", "B01ZZZZZZ9", "Other cup B0"]
    assert marked(webshop, PRODUCT) == ["'Acme mug, blue'"] and marked(webshop, "Search") == []
    tokens = [(0, 3), (3, 7), (7, 9), (9, 9), (9, 12)]  # one character makes a token noise
    assert noisy(tokens, [(5, 8), (11, 40)]) == [False, True, True, False, True]
    assert noisy(tokens, [(3, 3)]) == [False] * 5


def test_shares_by_hand():
    tokens = [Token(True, 0.25, 1.0), Token(False, 0.16, 0.5), Token(False, 0.64, 0.25)]
    lines = {(line["class"], line["loss"]): line for line in table(tokens, rho=0.2, q=0.5)}
    one = lines["noise", "ce"]
    assert (one["tokens"], one["token_share"], one["mean_p"], one["live"]) == (1, pytest.approx(1 / 3), 0.25, 0.0)
    assert (lines["rest", "mae"]["mean_p"], lines["rest", "mae"]["live"]) == (pytest.approx(0.4), 0.5)
    by_hand = {  # slopes 1, 1, 1; roots .5, .4, .8; p; p under .2
        "ce": (1 / 3, 1 / 1.75),
        "gce": (0.5 / 1.7, 0.5 / (0.5 + 0.2 + 0.2)),
        "mae": (0.25 / 1.05, 0.25 / (0.25 + 0.08 + 0.16)),
        "cmae": (0.0, 0.0),
    }
    for loss, shares in by_hand.items():
        for key, share in zip(("by_logp", "by_logits"), shares, strict=True):
            assert lines["noise", loss][key] == pytest.approx(share)
            assert lines["rest", loss][key] == pytest.approx(1 - share)
    with pytest.raises(UserError, match="no token of class 'noise' among 2"):
        table(tokens[1:], rho=0.2, q=0.5)


def test_tokens_carry_their_probability_and_the_norm_of_their_error(tiny_llm, tmp_path):
    folder = tiny_llm(tmp_path / "llm", kind="qwen3")
    chat, lm = Chat(AutoTokenizer.from_pretrained(folder)), AutoModelForCausalLM.from_pretrained(folder)
    texts = ["You arrive at shelf 1. On the shelf 1, you see a mug 1.", "", "Nothing happens."]
    ids = chat.prompt_ids("go"), chat.response_ids("look")
    turns = [
        Turn(*ids, [], None, "go", "look", Outcome(text, 0.0, False, False, "look", True), "", 0) for text in texts
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(
        json.dumps({"task": "t", "kind": "pick", "member": 0, "step": i, **asdict(turn)}) + "\n"
        for i, turn in enumerate(turns)
    ))  # fmt: skip
    config = load("quickstart", {"rollout.temperature": "0.7", "wm.max_tokens": "50"})
    tokens = measure(str(folder), config, household, 1, path)

    expected = []
    for text in texts:
        target = chat.observation_ids(text, 50)
        before = [*ids[0], *ids[1], *chat.separator_ids]
        with torch.no_grad():
            p = (lm(torch.tensor([before + target])).logits[0, len(before) - 1 : -1] / 0.7).double().softmax(-1)
        for at, token, (_, end) in zip(p, target, chat.observation_spans(text, 50), strict=False):
            error = at - torch.nn.functional.one_hot(torch.tensor(token), len(at))
            expected.append(
                (text.find("a mug") != -1 and end > text.find("a mug"), at[token].item(), error.norm().item())
            )
    got = sorted(tokens)  # batches are in an order of their own
    assert len(got) == len(expected) > 60
    for token, want in zip(got, sorted(expected), strict=True):
        assert token == pytest.approx(want, abs=1e-5)
    assert {token.noise for token in tokens} == {True, False}


def test_a_rule_of_your_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def digits(prompt, action, observation):\n    return [(0, len(action))]\n")
    assert find_rule(f"{file}:digits")("", "abc", "") == [(0, 3)]
    assert find_rule("webshop") is webshop
    for name, reason in {
        "search": "no noise rule 'search': there are alfworld, webshop, or give --rule FILE.py:FUNCTION",
        f"{file}:nothing": "the file has no 'nothing'",
        f"{tmp_path / 'none.py'}:f": "there is no file",
    }.items():
        with pytest.raises(UserError, match=reason):
            find_rule(name)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["m", "--tasks", "0"], "--tasks 0"),
        (["a", "b", "--rollouts", "file"], "give one MODEL"),
        (["m"], "m is not a run directory"),
    ],
)
def test_mistakes_are_told_before_anything_loads(words, reason):
    parser = argparse.ArgumentParser()
    noise.add_arguments(parser)
    with pytest.raises(UserError, match=reason):
        noise.run(parser.parse_args(words), {})


@pytest.mark.slow
def test_a_run_is_measured_at_its_start_and_after_training(paw_here, quick_run, tmp_path):
    told = paw_here("experiment", "noise-gradient", quick_run, "--tasks", 2, "--out", tmp_path / "noise").stdout
    with (tmp_path / "noise" / "noise.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {(line["stage"], line["class"], line["loss"]) for line in lines} == {
        (stage, kind, loss) for stage in ("start", "trained") for kind in ("noise", "rest") for loss in noise.SLOPES
    }
    assert (tmp_path / "noise" / "noise.md").read_text() in told
    assert (tmp_path / "noise" / "noise.png").read_bytes().startswith(b"\x89PNG")
    assert all(0 < float(line["mean_p"]) < 1 and int(line["tokens"]) > 0 for line in lines)
