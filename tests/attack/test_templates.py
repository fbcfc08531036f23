"""Chat templates that are broken, or that attack the process that renders them. They cost one line
when they are loaded, or an episode later."""

import json
import re

import pytest
from transformers import AutoTokenizer

from paw.errors import EnvironmentFailure, UserError
from paw.rollouts.text import template
from paw.rollouts.text.chat import Chat
from paw.rollouts.text.template import TemplateLimitError, within
from paw.types import Reply, ToolCall

GOOD = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ESCAPES = "{{ raise_exception('\x1b[2J\x1b]0;owned\x07no\u202e\nupdate 99/99') }}"
BROKEN = {
    "syntax": ("{% for m in messages %}{{ m['content'] }", "TemplateSyntaxError: unexpected '}'"),
    "include": ("{% include '/etc/passwd' %}" + GOOD, "no loader for this environment"),
    "sandbox": (
        "{{ messages.__class__.__mro__ }}" + GOOD,
        "SecurityError: access to attribute '__class__'",
    ),
    "raises": (ESCAPES + GOOD, "TemplateError: no update 99/99"),
    "undefined": ("{{ nothing.at.all }}" + GOOD, "UndefinedError: 'nothing' is undefined"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + GOOD, "RecursionError: "),
    "range": ("{% for i in range(10 ** 9) %}{% endfor %}" + GOOD, "OverflowError: Range too big"),
    "characters": ("{{ 'a' * 2000000 }}" + GOOD, "it writes more than 1,000,000 characters"),
}
FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GREEDY = {
    "loop": (FOR_EVER, "it takes more than 1 s of CPU time"),
    "loop with tools": (
        "{% if tools %}" + FOR_EVER + "{% endif %}",
        "it takes more than 1 s of CPU time",
    ),
    "power": ("{{ (10 ** (10 ** 9)) % 7 }}", "it takes more than 1 s of CPU time"),
    "text": ("{% set x = 'a' * 10 ** 10 %}", "it takes more than 1,024 MiB of memory"),
    "list": ("{% set x = messages * 10 ** 10 %}", "it takes more than 1,024 MiB of memory"),
    "width": ("{{ '%10000000000d' % 1 }}", "it takes more than 1,024 MiB of memory"),
    "doubling": (
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "it takes more than ",  # of time or of memory, whichever runs out first
    ),
}


@pytest.fixture
def model(tiny_llm, tmp_path):
    folder = tiny_llm(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(GOOD)
    return folder


def with_template(model, text):
    (model / "chat_template.jinja").write_text(text)
    return AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template_is_one_line(model, name):
    text, reason = BROKEN[name]
    with pytest.raises(UserError) as error:
        Chat(with_template(model, text))
    message = str(error.value)
    assert message.startswith(f"the chat template of '{model}' cannot be rendered: ")
    assert reason in message
    assert message.isprintable()
    assert message.endswith("fix chat_template.jinja in the model's folder, or use another model")


@pytest.mark.parametrize("name", GREEDY)
def test_a_template_that_takes_all_time_or_memory_is_one_line(model, name, monkeypatch):
    monkeypatch.setattr(template, "RENDER_S", 1)
    text, reason = GREEDY[name]
    with pytest.raises(UserError, match=re.escape(f"cannot be rendered: {reason}")):
        Chat(with_template(model, text + GOOD))


def test_commands_say_in_one_line_that_a_template_is_broken(model, paw_here, tmp_path):
    (model / "chat_template.jinja").write_text(BROKEN["raises"][0])
    problem = (
        f"the chat template of '{model}' cannot be rendered: TemplateError: no update 99/99; "
        "fix chat_template.jinja"
    )
    examined = paw_here("doctor", "--model", model, code=1)
    assert f"PROBLEM               {problem}" in examined.stdout
    assert "\x1b" not in examined.stdout + examined.stderr
    train_settings = {"model.path": model, "run.dir": tmp_path, "env.data": "none"}
    play_settings = {
        "env.name": "alfworld",
        "env.data": "none",
        "eval.games": 2,
        "engine.type": "transformers",
    }
    sft_settings = {"env.data": "none", "sft.turns": 2}
    for command in (
        ("train", "quickstart", train_settings),
        ("eval", model, play_settings),
        ("rollout", model, "--tasks", 1, play_settings),
        ("sft", model, "--recipe", "alfworld-grpo", "--out", tmp_path / "tuned", sft_settings),
    ):
        last_line = paw_here(*command, code=2).stderr.splitlines()[-1]
        assert last_line.startswith(f"paw: {problem}"), command
        assert not (tmp_path / "tuned").exists()


def test_templates_that_transformers_renders_pass_the_trial(model):
    unusual = (
        "{% generation %}{% for m in messages %}{% if loop.index > 99 %}{% break %}{% endif %}"
        "{% endfor %}{% endgeneration %}{{ strftime_now('%Y')[:0] }}"
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    )
    chat = Chat(with_template(model, unusual + GOOD))
    assert chat.decode(chat.prompt_ids("hello"), calls=True).count("hello") == 1


def test_a_conversation_that_the_template_never_finishes_costs_its_episode(model, monkeypatch):
    """The trial at load cannot find it, because only this environment has such a role."""
    of_critics = "{% if m['role'] == 'critic' %}" + FOR_EVER + "{% endif %}"
    text = "{% for m in messages %}" + of_critics + "{% endfor %}" + GOOD
    chat = Chat(with_template(model, text))
    monkeypatch.setattr("paw.rollouts.text.template.TURN_S", 0.3)
    messages = [{"role": "user", "content": "hello"}, {"role": "critic", "content": "no"}]
    with pytest.raises(
        EnvironmentFailure, match=r"does not take user, critic: it takes more than 0\.3 s"
    ):
        chat.conversation_ids(messages, [])
    with pytest.raises(EnvironmentFailure, match="does not take assistant, critic"):
        chat.following({"role": "assistant", "content": "hi"}, messages[1:])


def test_a_thread_that_takes_too_long_is_ended():
    appended = []

    def work():
        while True:
            appended.append(1)

    with pytest.raises(TemplateLimitError, match=r"it takes more than 0\.05 s"):
        within(0.05, work)
    count = -1
    while count != len(appended):  # until the thread has stopped
        count = len(appended)
        within(1.0, lambda: sum(range(10**6)))
    assert within(1.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(1.0, lambda: 1 / 0)


def test_a_call_that_the_template_does_not_take_is_one_line(model):
    refuses = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
        "{{ raise_exception('no calls\x1b[2J') }}{% endif %}{% endfor %}"
    )
    chat = Chat(with_template(model, refuses + GOOD))
    reply = Reply.of("", ToolCall("look", {}, "call00000"))
    with pytest.raises(EnvironmentFailure, match="does not take user, assistant: no calls"):
        chat.response_ids(reply)
    assert json.dumps(reply.message())
