"""The Hugging Face hub: what a model's card says, and the message if a model cannot be sent."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from paw.checkpoint.export import metadata
from paw.checkpoint.push import check_push
from paw.config.recipe import load
from paw.errors import UserError


def card(recipe, **keys):
    head = metadata(load(recipe, {key.replace("__", "."): value for key, value in keys.items()}))
    return ModelCard(f"---\n{head}\n---\n# text\n").data


def test_a_card_names_base_data_and_method(tmp_path):
    data = card("questions-grpo-paw", env__data="openai/gsm8k", env__subset="main")
    assert data.base_model == "Qwen/Qwen2.5-1.5B-Instruct"
    assert data.datasets == ["openai/gsm8k"]
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "text-generation"
    assert data.license is None
    assert {"paw", "questions", "grpo", "world-model"} <= set(data.tags)
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n", encoding="utf-8")
    # Folders on this disk are not names on the hub.
    data = card("alfworld-gigpo", model__path=str(tmp_path))
    assert data.base_model is None
    assert data.datasets is None
    assert data.license == "apache-2.0"
    assert "gigpo" in data.tags
    assert "world-model" not in data.tags
    assert card("quickstart").base_model is None


@pytest.mark.parametrize("name", ["mine", "a/b/c", "me/.hidden", "me/a--b", "/tmp", "./x", "me/"])
def test_a_name_that_is_none_is_refused_before_the_export(name):
    with pytest.raises(UserError, match=f"--push {name}: use USER/NAME"):
        check_push(name)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a push asks for, or one that refuses everything."""

    protocol_version = "HTTP/1.1"
    refuses = False
    asked: list[tuple[str, str]] = []

    def do_GET(self):
        self.answer(
            {"id": "base", "sha": "0" * 40, "siblings": [], "cardData": {"license": "apache-2.0"}}
        )

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        self.asked.append((self.path, body))
        files = []
        if "preupload" in self.path:
            for file in json.loads(body).get("files", []):
                modes = {"uploadMode": "regular", "shouldIgnore": False}
                files.append({"path": file["path"], **modes})
        url = f"http://{self.headers['Host']}/me/mine"
        self.answer({"url": url, "files": files, "commitUrl": f"{url}/commit/0", "commitOid": "0"})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(403 if self.refuses else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("---\nbase_model: a/b\n---\n# Mine\n", encoding="utf-8")
    for name in (
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "own.txt",
        "sub/config.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(Hub, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    yield server
    server.shutdown()
    server.server_close()


def test_a_push_is_private_and_sends_what_an_export_writes(tmp_path, hub):
    assert pushed(tmp_path).endswith("/me/mine/commit/0")
    bodies = dict(Hub.asked)
    assert json.loads(bodies["/api/repos/create"]) == {
        "name": "mine",
        "organization": "me",
        "visibility": "private",
    }
    sent = [
        json.loads(line)["value"]
        for line in bodies["/api/models/me/mine/commit/main"].splitlines()[1:]
    ]
    exported = ["README.md", "config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]
    assert sorted(file["path"] for file in sent) == exported
    assert ModelCard.load(tmp_path / "README.md").data.license == "apache-2.0"  # the base model's


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_line_and_the_model_stays(tmp_path, hub, monkeypatch):
    files_before = sorted(tmp_path.rglob("*"))
    end = f"; the model is in {tmp_path}"
    monkeypatch.setattr(Hub, "refuses", True)
    refused = pushed(tmp_path)
    assert refused.startswith("--push me/mine: HfHubHTTPError: ")
    assert "403 Forbidden" in refused
    without = pushed(tmp_path, HF_HOME=str(tmp_path / "none"), HF_TOKEN="")
    assert (
        without == f"--push me/mine: there is no token: run `hf auth login`, or set HF_TOKEN{end}"
    )
    hub.shutdown()
    hub.server_close()
    assert (
        pushed(tmp_path) == f"--push me/mine: 127.0.0.1 cannot be reached (Connection refused){end}"
    )
    assert pushed(tmp_path, HF_HUB_OFFLINE="1") == f"--push me/mine: HF_HUB_OFFLINE is set{end}"
    assert refused.endswith(end)
    assert sorted(tmp_path.rglob("*")) == files_before


def pushed(folder: Path, **variables: str) -> str:
    """The one line that a push ends with, in a process with these variables."""
    code = (
        "import sys; from pathlib import Path; from paw.checkpoint import push; from paw.errors import UserError\n"
        "try: print(push.push(Path(sys.argv[1]), 'me/mine'))\nexcept UserError as error: print(error)"
    )
    words = [sys.executable, "-c", code, str(folder)]
    result = subprocess.run(
        words, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    return line
