"""One turn with a verifiable answer: the example of docs/environments.md."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int


class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(30):
            yield Sum(Data(prompt=f"What is {n} + {n}?", answer=2 * n), self.config.task)


__all__ = ["Sums"]
