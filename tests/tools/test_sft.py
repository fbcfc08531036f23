"""`paw sft`: what a step minimises, expert play and recorded episodes, stopped and gone on with."""

import json
import math
import signal

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from toyworld import make_model

from paw.algo.packing import Packing
from paw.model.policy import Policy
from paw.tools.sft import sft
from paw.types import Outcome, Sample, Turn

ROWS = [
    Sample(0, 0, 0, [5, 6, 7, 8], [9, 1], [2], [10, 11, 12]),
    Sample(0, 0, 0, [4, 3], [8, 7, 1], [2], [6]),
]
SMALL = {
    "env.difficulty": "tiny", "env.max_turns": 6, "sft.turns": 24, "sft.lr": 1e-2, "optim.minibatch_samples": 6,
    "optim.warmup_updates": 0, "run.threads": 1, "rollout.max_prompt_tokens": 2048, "rollout.max_response_tokens": 32,
}  # fmt: skip


def plain_loss(model, lm_weight, observations, by_row):
    """What `step` minimises, sequence by sequence, with full logits."""
    answers = []
    rest = []
    for row in ROWS:
        ids = torch.tensor(
            [*row.prompt_ids, *row.response_ids, *row.separator_ids, *row.observation_ids]
        )
        start = len(row.prompt_ids)
        end = len(row.prompt_ids) + len(row.response_ids)
        logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        nll = -logp.gather(1, ids[1:, None])[:, 0]
        answers.append(nll[start - 1 : end - 1])
        rest.append(nll[: start - 1])
        if observations:
            rest.append(nll[end - 1 :])
    count = len(ROWS) if by_row else sum(map(len, answers))
    answer = torch.cat(answers).sum() / count
    return answer, answer + lm_weight * torch.cat(rest).mean()


@pytest.mark.parametrize(("lm_weight", "observations"), [(0.0, True), (0.3, True), (0.3, False)])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_step_is_that_of_the_mean_over_answers_and_the_weighed_rest(
    lm_weight, observations, by_row
):
    reference = make_model()
    answer, loss = plain_loss(reference, lm_weight, observations, by_row)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    expected_gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for budget in (None, 12, 1000):  # full logits; the fused head, row by row and at once
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        options = {
            "lm_weight": lm_weight,
            "observations": observations,
            "by_row": by_row,
            "packing": budget and Packing(budget=budget),
        }
        reported_loss = sft.step(Policy(model), [optimizer], ROWS, lr=0.0, **options)
        assert reported_loss == pytest.approx(float(answer.detach()), abs=1e-4)
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter.grad, expected_gradients[name], atol=1e-5), (
                name,
                budget,
            )


@pytest.fixture
def learn(tiny_llm, tmp_path, paw_here):
    model = tiny_llm(tmp_path / "model")

    def run(out, *words, code=0, **changes):
        overrides = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
        return paw_here(
            "sft",
            model,
            "--recipe",
            "quickstart",
            "--out",
            tmp_path / out,
            *words,
            overrides,
            code=code,
        )

    return run


@pytest.mark.slow
def test_expert_play_is_learnt_and_a_stopped_run_goes_on_to_the_same_model(
    learn, tmp_path, monkeypatch
):
    err = learn("whole", sft__epochs=4).stderr
    assert "24 turns of expert play of alfworld" in err
    assert "step 16 of 16" in err
    losses = [
        float(line.partition("loss ")[2].split()[0]) for line in err.splitlines() if "loss " in line
    ]
    assert losses[-1] < 0.7 * losses[0]  # from log 258
    assert (
        "fine-tuning on expert play of alfworld" in (tmp_path / "whole" / "README.md").read_text()
    )

    real = sft.step
    steps = []

    def told_to_stop(*args, **options):
        steps.append(options)
        if len(steps) == 7:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "step", told_to_stop)
        err = learn("parts", code=2, sft__epochs=4).stderr
    assert "stopped by SIGINT after step 7 of 16: the same command continues" in err
    assert not (tmp_path / "parts" / "config.json").exists()
    err = learn("parts", code=2, sft__epochs=5).stderr
    assert "step_000007 there is from other data or settings" in err
    assert err.count("\n") == 2
    assert "going on from step 7 of 16" in learn("parts", sft__epochs=4).stderr
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not (tmp_path / "parts" / "checkpoints").exists()
    assert "it already contains a model" in learn("parts", code=2).stderr


def test_a_killed_run_goes_on_from_its_last_checkpoint(learn, tmp_path, monkeypatch):
    real = sft.step

    def diverging_step(*args, **options):
        """Diverges once the checkpoint of the third step exists."""
        if list(tmp_path.glob("o/*/step_*3")):
            return math.nan
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "step", diverging_step)
        errors = learn("o", code=2, sft__save_every=3).stderr
        assert "diverged at step 4 of 4; lower sft.lr" in errors
    assert "going on from step 3 of 4" in learn("o", sft__save_every=3).stderr


def as_json(turn):
    return TypeAdapter(Turn).dump_python(turn, mode="json")


def test_of_recorded_episodes_the_valid_turns_of_won_ones_are_learnt(learn, tmp_path, monkeypatch):
    def turn(response, *, valid=True, won=False, done=False, ids=None):
        outcome = Outcome("You see a mug 1.", float(won), done, won, response, valid=valid)
        ids = ids or [ord(c) - ord("a") for c in response]
        return {
            **as_json(Turn([1, 2], ids, [], None, "task: go.", response, outcome, "", 0)),
            "task": "t",
            "kind": "k",
        }

    lines = [
        {**turn("look", valid=False), "member": 0, "step": 0},
        {
            **turn("go", won=True, done=True, ids=[300_000]),
            "member": 0,
            "step": 1,
        },  # of a model with more tokens
        {**turn("wait", done=True), "member": 1, "step": 0},
    ]
    file = tmp_path / "episodes.jsonl"
    learnt = []
    monkeypatch.setattr(sft, "fine_tune", lambda policy, rows, *_, **__: learnt.append(rows) or 1)
    for lines_in_file, expected in ((lines, ["go"]), (lines[2:], [])):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines_in_file))
        out = learn(f"out{len(expected)}", "--rollouts", file, code=0 if expected else 2)
        if expected:
            (row,) = learnt.pop()
            assert len(row.response_ids) == 3
            assert max(row.response_ids) < 258
            assert len(row.prompt_ids) > 20
        else:
            assert "no valid turn of a won episode in it (--sft.won false takes all)" in out.stderr
    learn("all", "--rollouts", file, sft__won="false")
    assert [len(row.response_ids) for row in learnt.pop()] == [5]


def test_no_expert_to_learn_from_is_one_line(tiny_llm, paw_here, tmp_path):
    model = tiny_llm(tmp_path / "model")
    (tmp_path / "mine.py").write_text(
        "from paw.types import Outcome, Task\n"
        "class Mine:\n"
        "    def tasks(self, split, seed): return [Task('a', 'a')]\n"
        "    def make(self): return self\n"
        "    def reset(self, task): return 'hello'\n"
        "    def context(self): return 'hello'\n"
        "    def step(self, response): return Outcome('', 0.0, True, False, response)\n"
    )
    name = f"{tmp_path / 'mine.py'}:Mine"
    err = paw_here("sft", model, "--out", tmp_path / "o", {"env.name": name}, code=2).stderr
    assert "has no oracle(), so there is no expert play to learn from" in err
    assert err.count("\n") == 1
