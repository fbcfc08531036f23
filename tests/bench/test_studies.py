"""bench/studies/. Where the world model's gradient lies: shares by hand, rules on real texts, p
against full logits; and training curves."""

import csv
import importlib
import json
import math
from dataclasses import asdict
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from joint import tiny_policy
from transformers import AutoModelForCausalLM, AutoTokenizer

from paw.algo.loss import log_probs
from paw.algo.packing import Packing
from paw.config.recipe import load
from paw.errors import UserError
from paw.rollouts.text.chat import Chat
from paw.types import Outcome, Sample, Turn

noise_gradient, dynamics, prediction = (
    importlib.import_module(f"bench.studies.{name}")
    for name in ("noise_gradient", "dynamics", "prediction_reward")
)
PROMPT = (
    "see:\nYou arrive at shelf 1. On the shelf 1, you see a mug 1.\ncan:\ntake mug 1 from shelf 1"
)
RESULTS = (
    "Instruction: [SEP] a mug [SEP] Page 1 (Total results: 2) [SEP] B09ABCDEF1 [SEP] Acme mug, blue [SEP] $9.99"
    " [SEP] B01ZZZZZZ9 [SEP] Other cup B0 [SEP] $5"
)
PRODUCT = "'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'red' [SEP] 'Acme mug, blue' [SEP] 'Price: $9.99'"


def test_what_nobody_can_predict_is_noise(tmp_path):
    """In a household what lies in a place, unless the prompt shows it already; in a shop codes and
    titles."""
    file = tmp_path / "mine.py"
    file.write_text("def digits(prompt, action, observation):\n    return [(0, 3)]\n")
    for name, observation, expected in (
        (
            "alfworld",
            "You arrive at shelf 2. On the shelf 2, you see a mug 1, and a pan 2.",
            ["a mug 1, and a pan 2"],
        ),
        (
            "alfworld",
            "You open the fridge 1. The fridge 1 is open. In it, you see nothing.",
            ["nothing"],
        ),
        ("alfworld", "You arrive at fridge 1. The fridge 1 is closed.", []),
        ("alfworld", "You are facing the shelf 1. Next to it, you see nothing.", []),
        ("alfworld", "On the shelf 1, you see a mug 1.", []),  # examined again: the prompt holds it
        ("alfworld", "On the shelf 1, you see a mug 1, and a pan 2.", ["a mug 1, and a pan 2"]),
        ("webshop", RESULTS, ["B09ABCDEF1", "Acme mug, blue", "B01ZZZZZZ9", "Other cup B0"]),
        ("webshop", PRODUCT, ["'Acme mug, blue'"]),
        ("webshop", "Search", []),
        (f"{file}:digits", "abcdef", ["abc"]),
    ):
        assert [
            observation[start:end]
            for start, end in noise_gradient.find_rule(name)(PROMPT, "", observation)
        ] == expected
    message = (
        r"no noise rule 'search': there are alfworld, webshop, or give --rule FILE\.py:FUNCTION"
    )
    with pytest.raises(UserError, match=message):
        noise_gradient.find_rule("search")
    tokens = [(0, 3), (3, 7), (7, 9), (9, 9), (9, 12)]  # one character makes a token noise
    assert noise_gradient.noisy(tokens, [(5, 8), (11, 40)]) == [False, True, True, False, True]


def test_shares_by_hand():
    tokens = [
        noise_gradient.Token(True, 0.25, 1.0),
        noise_gradient.Token(False, 0.16, 0.5),
        noise_gradient.Token(False, 0.64, 0.25),
    ]
    lines = {
        (line["class"], line["loss"]): line for line in noise_gradient.table(tokens, rho=0.2, q=0.5)
    }
    line_of_ce = lines["noise", "ce"]
    assert line_of_ce["tokens"] == 1
    assert line_of_ce["token_share"] == pytest.approx(1 / 3)
    assert line_of_ce["mean_p"] == 0.25
    assert line_of_ce["live"] == 0.0
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
    assert lines["rest", "mae"]["mean_p"] == pytest.approx(0.4)
    assert lines["rest", "mae"]["live"] == 0.5
    with pytest.raises(UserError, match="no token of class 'noise' among 2"):
        noise_gradient.table(tokens[1:], rho=0.2, q=0.5)


def test_tokens_carry_their_probability_and_the_norm_of_their_error(tiny_llm, tmp_path):
    folder = tiny_llm(tmp_path / "llm", kind="qwen3")
    chat = Chat(AutoTokenizer.from_pretrained(folder))
    lm = AutoModelForCausalLM.from_pretrained(folder)
    texts = ["You arrive at shelf 1. On the shelf 1, you see a mug 1.", "", "Nothing happens."]
    ids = chat.prompt_ids("go"), chat.response_ids("look")
    path = tmp_path / "rollouts.jsonl"
    expected = []
    with path.open("w") as file:
        for i, text in enumerate(texts):
            turn = Turn(
                *ids, [], None, "go", "look", Outcome(text, 0.0, False, False, "look", True), "", 0
            )
            file.write(
                json.dumps(
                    {"task": "t", "kind": "pick", "member": 0, "step": i, **asdict(turn)},
                    default=np.ndarray.tolist,
                )
                + "\n"
            )
    config = load("quickstart", {"rollout.temperature": "0.7", "wm.max_tokens": "50"})
    # Batches have an order of their own.
    measured = sorted(
        noise_gradient.measure(str(folder), config, noise_gradient.household, 1, path)
    )
    for text in texts:
        target = chat.observation_ids(text, 50)
        prefix = [*ids[0], *ids[1], *chat.separator_ids]
        with torch.no_grad():
            p = (
                (lm(torch.tensor([prefix + target])).logits[0, len(prefix) - 1 : -1] / 0.7)
                .double()
                .softmax(-1)
            )
        for p_at, token, (_, end) in zip(p, target, chat.observation_spans(text, 50), strict=False):
            error = p_at - torch.nn.functional.one_hot(torch.tensor(token), len(p_at))
            expected.append(
                (
                    "a mug" in text and end > text.find("a mug"),
                    p_at[token].item(),
                    error.norm().item(),
                )
            )
    assert len(expected) > 60
    assert len(measured) == len(expected)
    assert {token.noise for token in measured} == {True, False}
    for token, expected_token in zip(measured, sorted(expected), strict=True):
        assert token == pytest.approx(expected_token, abs=1e-5)


@pytest.mark.slow
def test_a_run_is_measured_at_its_start_and_after_training(
    quick_run, paw_env, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PAW_CACHE", paw_env["PAW_CACHE"])
    noise = tmp_path / "noise"
    curves = tmp_path / "curves"
    noise_gradient.main(
        [
            str(quick_run),
            "--tasks",
            "6",
            "--out",
            str(noise),
            "--rollout.group_size",
            "2",
        ]
    )
    with (noise / "noise.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {(line["stage"], line["class"], line["loss"]) for line in lines} == {
        (stage, kind, loss)
        for stage in ("start", "trained")
        for kind in ("noise", "rest")
        for loss in noise_gradient.SLOPES
    }
    assert all(0 < float(line["mean_p"]) < 1 and int(line["tokens"]) > 0 for line in lines)
    study = tmp_path / "study" / "runs"
    study.mkdir(parents=True)
    for seed in (0, 1):
        (study / f"paw-{seed}").symlink_to(quick_run)
    dynamics.main([str(quick_run), str(study.parent), "--out", str(curves)])
    with (curves / "dynamics.csv").open() as file:
        assert [row["update"] for row in csv.DictReader(file)] == ["0", "1", "2"] * 3
    output = capsys.readouterr().out
    assert (noise / "noise.md").read_text() in output
    assert "|  | first (3) |" in output
    assert "| lambda | " in output
    for figure in (noise / "noise.png", curves / "dynamics.png"):
        assert figure.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_told_before_anything_loads(capsys):
    for study, words, message in (
        (dynamics, "nowhere", "nowhere: no such run directory"),
        (dynamics, "nowhere --wm.alpha 1", "unrecognized arguments: --wm.alpha 1"),
        (noise_gradient, "m --tasks 0", "--tasks 0"),
        (noise_gradient, "a b --rollouts file", "give one MODEL"),
        (noise_gradient, "m", "m is not a folder"),
    ):
        with pytest.raises(SystemExit, match="2"):
            study.main(words.split())
        assert message in capsys.readouterr().err


def test_prediction_as_a_reward_adds_to_the_score_what_an_episode_predicted():
    """Two episodes of one outcome: only the probability of their observations tells GRPO which is
    better."""
    run = SimpleNamespace(
        policy=tiny_policy(), config=load("miniature"), packing=Packing(budget=64)
    )
    prediction.Prediction().on_start(run)
    observations = [[4, 5], [6, 7, 8]]
    samples = [
        Sample(0, i, 0, [1, 2], [3], separator_ids=[9], observation_ids=ids)
        for i, ids in enumerate(observations)
    ]
    alone = [Sample(0, i, 0, [1, 2, 3, 9], ids) for i, ids in enumerate(observations)]
    logp = log_probs(run.policy, alone, Packing(budget=64), temperature=1.0)
    first, second = (fmean(map(math.exp, logp[i][0])) for i in range(2))
    advantages = prediction.grpo(samples, bonus=2.0, eps=0.0)
    assert advantages == pytest.approx(
        [math.copysign(2**-0.5, first - second), math.copysign(2**-0.5, second - first)]
    )
    half = prediction.grpo(samples, bonus=2.0, eps=1.0)[0]
    std = abs(first - second) * 2 / 2**0.5
    assert half == pytest.approx((first - second) / (std + 1.0))
    assert prediction.grpo(samples, bonus=0.0) == [0.0, 0.0]
