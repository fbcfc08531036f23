"""Whatever an OpenEnv server does wrong costs one line, and at most an episode."""

import json
import subprocess
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from processes import wait_until
from websockets.sync.server import serve

from paw.envs import make_factory
from paw.envs.base import ENDLESS_EVAL, eval_tasks, train_tasks
from paw.envs.bridges import openenv
from paw.errors import EnvironmentFailure, UserError
from paw.rollouts.guard import CheckedEnv
from paw.tools.evaluate.played import load_played
from paw.types import Reply, ToolCall

TEXT = {"properties": {"text": {"type": "string"}, "metadata": {"type": "object"}}}
SCHEMA = {"action": TEXT, "observation": TEXT}


def seen(text, reward=0.0, done=False):
    return json.dumps(
        {
            "type": "observation",
            "data": {"observation": {"text": text}, "reward": reward, "done": done},
        }
    )


def refused(code, message="no", **more):
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


class Scripted:
    """A server that follows one script per connection; the last script is repeated.

    A script is a list of answers: text or bytes to send, seconds to wait, or None, which cuts the
    connection.
    """

    def __init__(self, schema=SCHEMA, port=0):
        self.scripts = [[seen("begin"), seen("go on")]]
        self.asked = []
        self.schema = schema
        self.server = serve(self.play, "127.0.0.1", port, process_request=self.http)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"

    def http(self, connection, request):
        if request.path == "/ws":
            return None
        page = {"/schema": self.schema, "/list_environments": []}.get(request.path)
        status = HTTPStatus.NOT_FOUND if page is None else HTTPStatus.OK
        return connection.respond(status, page if isinstance(page, str) else json.dumps(page))

    def play(self, socket):
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        for answer in script:
            if answer is None:
                socket.socket.close()
                return
            comes_unasked = isinstance(answer, str) and "CAPACITY" in answer
            if not comes_unasked:
                self.asked.append(json.loads(socket.recv()))
            if isinstance(answer, float):
                time.sleep(answer)
            else:
                socket.send(answer)


@pytest.fixture
def server():
    scripted = Scripted()
    yield scripted
    scripted.server.shutdown()


def begin(url, **settings):
    """(an environment of the server with these settings of `env`, its first task)."""
    changes = {"env.name": "openenv", "env.url": url}
    changes |= {f"env.{name}": value for name, value in settings.items()}
    config = load_played(None, changes)
    factory = make_factory(config)
    return CheckedEnv(factory.make(), config.env), train_tasks(factory, 0, 1, 0)[0]


def test_a_dropped_connection_before_the_first_step_is_made_again(server):
    server.scripts = [[None], [seen("begin"), None], [seen("begin"), seen("go on"), None]]
    environment, task = begin(server.url)
    assert environment.reset(task) == "begin"
    assert environment.step("<think>why</think> go ").observation == "go on"
    reset_request = {"type": "reset", "data": task.payload}
    assert server.asked == [reset_request, reset_request, {"type": "step", "data": {"text": "go"}}]
    with pytest.raises(EnvironmentFailure, match="the connection was lost in step"):
        environment.step("go")
    server.scripts = [[seen("begin"), None], [seen("another begin")]]
    environment.reset(task)
    with pytest.raises(EnvironmentFailure, match="the same reset began another episode"):
        environment.step("go")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("{", "step: not a message of OpenEnv: Invalid JSON"),
        ("[1]", "step: not a message of OpenEnv: Input should be an object, not"),
        (
            '{"type": "observation", "data": {"observation": []}}',
            "observation: Input should be a valid dictionary",
        ),
        (seen("x", reward="much"), "not an observation of OpenEnv: reward"),
        (seen("x", reward=float("nan")), "Outcome.reward is nan"),
        ('{"type": "state", "data": {}}', r"step: state \(None\)"),
        (
            refused("EXECUTION_ERROR", "it broke\nupdate 99/99"),
            r"step: it broke update 99/99 \(EXECUTION_ERROR\)",
        ),
        (b"\xff\xfe", "not a message of OpenEnv"),
        ("x" * (17 << 20), "the connection was lost in step"),
        (0.4, "no answer to step within env.step_timeout_s = 0.2"),
        (None, "the same reset began another episode"),
    ],
)
def test_a_bad_answer_costs_the_episode(server, answer, problem):
    server.scripts = [[seen("begin"), answer]]
    if answer is None:  # the connection is made again
        server.scripts.append([seen("another")])
    environment, task = begin(server.url, step_timeout_s="0.2" if answer == 0.4 else "5")
    environment.reset(task)
    with pytest.raises(EnvironmentFailure, match=problem):
        environment.step("go")
    server.scripts = [[seen("begin"), seen("right", reward=True, done=True)]]
    assert environment.reset(task) == "begin"
    assert environment.step("go").won


def test_an_action_that_the_server_refuses_is_an_invalid_one(server):
    server.scripts = [
        [seen("begin"), refused("VALIDATION_ERROR", errors=[{"msg": "too long"}]), seen("go on")]
    ]
    environment, task = begin(server.url)
    environment.reset(task)
    for response, problem in (("go", "too long"), (" ", "there is none")):
        outcome = environment.step(response)
        assert not outcome.valid
        assert problem in outcome.observation
    assert environment.step("go").valid
    assert environment.context()[-1] == {
        "role": "user",
        "content": "go on",
    }


def test_a_full_server_ends_the_run_and_one_that_is_away_costs_the_episode(server, monkeypatch):
    monkeypatch.setattr(openenv, "RETRY_S", 0.3)
    environment, task = begin(server.url)
    server.scripts = [[refused("CAPACITY_REACHED", "1 of 1 sessions")], [seen("begin")]]
    assert environment.reset(task) == "begin"
    server.scripts = [[refused("CAPACITY_REACHED", "1 of 1 sessions")]]
    with pytest.raises(UserError, match="1 of 1 sessions; raise max_concurrent_envs there"):
        environment.reset(task)
    port = server.server.socket.getsockname()[1]
    server.server.shutdown()
    with pytest.raises(EnvironmentFailure, match="Connection refused"):
        environment.reset(task)
    server.server = Scripted(port=port).server
    assert environment.reset(task) == "begin"


FIELDS = {
    "left": {"type": "integer"},
    "a": {"type": "string"},
    "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
OPTIONS = {"action": {"properties": FIELDS}, "observation": {"properties": FIELDS}}


@pytest.mark.parametrize(
    ("schema", "settings", "message"),
    [
        ("<html>", {}, "that is not a server of OpenEnv: /schema: Invalid JSON"),
        ([], {}, "that is not a server of OpenEnv"),
        ({"action": 3, "observation": {}}, {}, "that is not a server of OpenEnv"),
        (None, {}, "that is not a server of OpenEnv: it has no /schema"),
        (
            OPTIONS,
            {},
            r"the action of http\S+ has left \(integer\), a \(text\), b \(text\); '\*' lets the model",
        ),
        (OPTIONS, {"action_field": "c"}, "env.action_field = 'c' is not a field of"),
        (
            OPTIONS,
            {"action_field": "a", "prompt_field": "p"},
            "env.prompt_field = 'p' is not a field of",
        ),
        (SCHEMA, {"instruction": "/nowhere"}, "env.instruction = '/nowhere': cannot be read"),
        (SCHEMA, {"image": "x"}, "needs either env.url = 'http://...' or env.image"),
    ],
)
def test_what_cannot_be_played_is_one_line(server, schema, settings, message):
    server.schema = schema
    with pytest.raises(UserError, match=message):
        environment, task = begin(server.url, **settings)
        environment.reset(task)


@pytest.mark.parametrize("key", ["input_schema", "inputSchema", "schema"])
def test_tools_have_their_schemas_whatever_a_server_calls_them(server, key):
    server.schema = {"action": {"properties": {}}, "observation": TEXT}
    put_tool = {"name": "put", "description": "", key: {"properties": {}, "required": ["thing"]}}
    listed = json.dumps({"type": "observation", "data": {"observation": {"tools": [put_tool]}}})
    server.scripts = [[seen("begin"), listed, seen("put")]]
    environment, task = begin(server.url)
    if key == "schema":
        with pytest.raises(
            EnvironmentFailure, match="tool 'put' has 'schema'; the schema of its arguments must be"
        ):
            environment.reset(task)
        return
    environment.reset(task)
    outcome = environment.step(Reply.of("", ToolCall("put", {})))
    assert not outcome.valid
    assert "'thing' is a required property" in outcome.observation
    assert environment.step(Reply.of("", ToolCall("put", {"thing": "cup"}))).valid


@pytest.fixture
def counted():
    """`counted(n)` is the URL of a server with `n` tasks, as JSON, in each of its splits: train and
    test, or those named. It plays none of them."""
    answers = {"/schema": json.dumps(SCHEMA), "/list_environments": '["e"]'}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = answers[self.path].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def url(number, splits=("train", "test")):
        answers["/e/splits"] = json.dumps([{"name": split} for split in splits])
        answers["/e/num_tasks"] = f'{{"num_tasks": {number}}}'
        return f"http://127.0.0.1:{server.server_port}"

    yield url
    server.shutdown()
    server.server_close()


def factory_of(url):
    return make_factory(load_played(None, {"env.name": "openenv", "env.url": url}))


def indices_of(tasks):
    return [task.payload["index"] for task in tasks]


@pytest.mark.parametrize(
    ("splits", "chosen"),
    [
        (("train", "valid_unseen"), "valid_unseen"),  # as `paw serve env alfworld` has
        (("train", "valid_unseen", "more", "test"), "test"),
        (("more", "train"), "more"),
        (("train", "some", "more"), r"eval_split is not set: http\S+ has some, more; name one"),
        (("train",), "has no split 'test'; env.train_split and env.eval_split can be train"),
    ],
)
def test_the_split_to_evaluate_on_is_found(counted, splits, chosen):
    url = counted("30", splits)
    if chosen not in splits:
        with pytest.raises(UserError, match=chosen):
            factory_of(url)
        return
    (task,) = eval_tasks(factory_of(url), "auto", 1, 0)
    assert task.payload["split"] == chosen


@pytest.mark.parametrize("number", ["10000000000", "1" + "0" * 400])
def test_more_tasks_than_can_be_listed_are_drawn(counted, number):
    factory = factory_of(counted(number))
    drawn_indices = indices_of(train_tasks(factory, 0, 100, 0))
    assert all(0 <= index < int(number) for index in drawn_indices)
    assert len({*drawn_indices}) == 100
    assert drawn_indices == indices_of(train_tasks(factory, 0, 100, 0))
    assert len(eval_tasks(factory, "test", 0, 0)) == ENDLESS_EVAL
    assert factory.fingerprint()


def test_tasks_that_can_be_listed_are_played_in_epochs(counted):
    factory = factory_of(counted("30"))
    for epoch in range(2):
        assert sorted(indices_of(train_tasks(factory, epoch, 30, 0))) == [*range(30)]
    assert sorted(indices_of(eval_tasks(factory, "test", 0, 0))) == [*range(30)]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            "0",
            r"env.url: http\S+ says that its split 'train' has 0 tasks; name another \(env.train_split, env.eval_split",
        ),
        ("-5", "its split 'train' has -5 tasks"),
        ("-1" + "0" * 400, "its split 'train' has -1000"),
        ("1" + "0" * 5000, "that is not a server of OpenEnv: /e/num_tasks: Invalid JSON"),
        (
            "true",
            "that is not a server of OpenEnv: /e/num_tasks: num_tasks: Input should be a valid integer, not True",
        ),
        (
            "2.5",
            "that is not a server of OpenEnv: /e/num_tasks: num_tasks: Input should be a valid integer, not 2.5",
        ),
    ],
)
def test_a_number_of_tasks_that_cannot_be_is_one_line(counted, number, message):
    with pytest.raises(UserError, match=message) as error:
        train_tasks(factory_of(counted(number)), 0, 1, 0)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_fields_that_are_not_text_are_json(server):
    server.schema = OPTIONS
    observation = {"observation": {"left": 3, "a": "ä"}}
    server.scripts = [[json.dumps({"type": "observation", "data": observation})] * 3]
    environment, task = begin(server.url, action_field="left")
    assert environment.reset(task) == '{"left": 3, "a": "ä"}'
    assert environment.step("2").valid
    assert not environment.step("two").valid
    environment, task = begin(server.url, action_field="*", observation_field="a")
    assert environment.reset(task) == "ä"
    assert environment.step('{"left": 1, "a": "x"}').action
    steps = [message["data"] for message in server.asked if message["type"] == "step"]
    assert steps == [{"left": 2}, {"left": 1, "a": "x"}]


STARTS_A_CONTAINER = """
import os
from paw.envs.bridges.openenv import container
print(container("a/b:1"), flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_container_ends_with_the_process(server, paw_env, tmp_path):
    """A script takes the place of docker, which is not on this machine. It logs the commands that
    it gets."""
    log_file = tmp_path / "log"
    docker = tmp_path / "docker"
    answers = f"[ $1 = run ] && echo c0ffee; [ $1 = port ] && echo {server.url[7:]}; :"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {log_file}\n{answers}\n')
    docker.chmod(0o755)
    variables = paw_env | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    killed = subprocess.run(
        [sys.executable, "-c", STARTS_A_CONTAINER], env=variables, capture_output=True, text=True
    )
    assert killed.returncode == -9
    assert killed.stdout == f"{server.url}\n"
    wait_until(lambda: "rm --force" in log_file.read_text(), seconds=10)
    run_command = "run --detach --rm --publish=127.0.0.1::8000 --env=MAX_CONCURRENT_ENVS=1024 a/b:1"
    assert log_file.read_text().splitlines() == [
        run_command,
        "port c0ffee 8000/tcp",
        "rm --force c0ffee",
    ]
