"""A real HTTP server on loopback whose answers a test scripts, one by one."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace


def completion(text="<think>x</think><action>look</action>", *, finish="stop", prompt=11, answer=5):
    choice = {
        "index": 0,
        "finish_reason": finish,
        "message": {"role": "assistant", "content": text},
    }
    usage = {"prompt_tokens": prompt, "completion_tokens": answer}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


def refusal(message, **details):
    return {"error": {"message": message, "type": "invalid_request_error", **details}}


@contextmanager
def serve():
    """Answers with the next entry of `server.script`, (status, body, headers) or a function of the
    handler, and with `default` when there are none left."""
    state = SimpleNamespace(
        script=[], default=(200, completion(), {}), requests=[], models=["m", "n"]
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if isinstance(state.models, int):
                return self.answer(state.models, refusal("no"), {})
            models = [{"id": name, "object": "model"} for name in state.models]
            self.answer(200, {"object": "list", "data": models}, {})

        def do_POST(self):
            if not (body := self.rfile.read(int(self.headers["Content-Length"]))):
                return  # the client has gone
            state.requests.append(json.loads(body))
            scripted = state.script.pop(0) if state.script else state.default
            with suppress(OSError):  # the client has gone
                if callable(scripted):
                    scripted(self)
                else:
                    self.answer(*scripted)

        def answer(self, status, body, headers, *, cut=0):
            encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            defaults = {"Content-Type": "application/json", "Content-Length": len(encoded)}
            for key, value in (defaults | headers).items():
                self.send_header(key, str(value))
            self.end_headers()
            self.wfile.write(encoded[: len(encoded) - cut])
            self.close_connection = self.close_connection or cut > 0

        def log_message(self, *_):
            pass

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http_server.daemon_threads = True
    threading.Thread(target=http_server.serve_forever, args=(0.01,), daemon=True).start()
    state.url = f"http://127.0.0.1:{http_server.server_port}"
    yield state
    http_server.shutdown()
    http_server.server_close()
