"""Many turns: the environment talks to its agent. Some guesses break it."""

import asyncio
import time

import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int


class Guess(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.number))


class Numbers(vf.Taskset[Guess, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            n += 1
            data = Data(
                prompt="Guess a number from 1 to 9.",
                system_prompt="Only the number.",
                number=1 + n % 9,
            )
            yield Guess(data, self.config.task)


class Game(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as player:
            said = await player.turn()
            while not said.terminated and said.last_reply != str(task.data.number):
                if said.last_reply == "raise":
                    raise RuntimeError("the game broke")
                if said.last_reply == "wait":
                    await asyncio.sleep(1000)
                while said.last_reply == "block":
                    time.sleep(0.05)
                low = said.last_reply.isdecimal() and int(said.last_reply) < task.data.number
                said = await player.turn("higher" if low else "lower")


__all__ = ["Game", "Numbers"]
