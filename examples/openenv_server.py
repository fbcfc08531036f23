"""An environment on an OpenEnv server, played over the network.

The script starts a real server in its own process, with the game of own_environment.py. A small
model that has seen some play learns on it. PaW's client does not need the package openenv.

Needs: pip install 'paw-trainer[openenv]' for the server (in an environment without vLLM), and
       pip install websockets aiohttp for the client
Took: 70 s of processor time of an AMD EPYC, including the server and the start model.
Change first: `url`, the address of your own server; leave out env.prompt_field if its observations
are ordinary texts; then `--model.path` a pretrained model.
"""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from own_environment import Fetch

import paw

GAME = Path(__file__).with_name("own_environment.py")


@contextmanager
def served(game):
    """Yield the URL of an OpenEnv server with this game, which ends with the block."""
    command = [sys.executable, "-m", "paw", "serve", "env", f"{game}:Fetch", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        try:
            line = server.stderr.readline().strip()
            if not line.startswith("http"):
                raise paw.UserError(line.removeprefix("paw: "))
            yield line.partition(": ")[0]
        finally:
            server.terminate()


def main(words):
    changes = {"env.name": Fetch, "env.max_turns": 6, "eval.games": 0, "eval.attempts": 8}
    changes |= {"run.updates": 30, "rollout.tasks": 8, "run.name": "openenv-server"}
    changes |= {"warmup.max_steps": 60, "warmup.corpus_turns": 1000}
    local = paw.load("quickstart", words, **changes)
    with served(GAME) as url:
        remote = {"env.name": "openenv", "env.url": url, "env.prompt_field": "prompt"}
        remote |= {"env.max_turns": 6, "env.eval_split": "valid_unseen"}
        remote |= {"model.path": paw.warmup(local)}
        report = paw.train(paw.load(local, **remote), numbered=True)
    success = [*paw.metric(report.parent, "eval/success").values()]
    print(f"Cups fetched from unseen places: {success[0]:.0%} -> {success[-1]:.0%}. {report}")


if __name__ == "__main__":
    paw.script(main)
