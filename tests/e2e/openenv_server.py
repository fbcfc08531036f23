"""Two environments written with the package openenv, served at /guess and /shelf on a free port."""

import socket
import sys

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)


class GuessAction(Action):
    guess: str


class GuessObservation(Observation):
    said: str
    left: int


class Guess(Environment):
    """Guess a number whose parity equals that of the seed. The first letter of an answer stands for
    a number."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **_):
        self.odd = seed % 2
        self.left = 3
        return GuessObservation(said=f"Guess {'odd' if self.odd else 'even'}.", left=3)

    def step(self, action, timeout_s=None, **_):
        if action.guess == "break":
            raise RuntimeError("the dice fell off the table")
        self.left -= 1
        is_right = ord(action.guess[0]) % 2 == self.odd
        return GuessObservation(
            said="right" if is_right else "wrong",
            left=self.left,
            reward=is_right / 4,
            done=self.left == 0,
        )


class Shelf(MCPEnvironment):
    """An environment with tools only: put 2 things on a shelf."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        server = FastMCP("shelf")

        @server.tool
        def put(thing: str, count: int = 1) -> str:
            """Put things on the shelf."""
            if thing == "cat":
                raise ValueError("it jumped off")
            self.things += [thing] * count
            return f"{len(self.things)} on the shelf"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_):
        self.things = []
        return Observation(metadata={"status": "ready"})

    async def step_async(self, action, timeout_s=None, **_):
        observation = await super().step_async(action, timeout_s=timeout_s)
        if isinstance(observation, CallToolObservation):
            observation.done = len(self.things) >= 2
            observation.reward = float(observation.done)
        return observation

    def _step_impl(self, action, timeout_s=None, **_):
        raise TypeError("only tools are called here")


if __name__ == "__main__":
    app = FastAPI()
    app.mount("/guess", create_fastapi_app(Guess, GuessAction, GuessObservation, 16))
    app.mount("/shelf", create_fastapi_app(Shelf, CallToolAction, CallToolObservation, 16))
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off")).run(sockets=[listener])
