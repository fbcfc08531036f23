"""Tasks written with verifiers: sums, with half of the reward for giving any number.

This file does not know about PaW; verifiers_taskset.py trains on it.
"""

import re

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int


class Sum(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def gives_a_number(self, trace: vf.Trace) -> float:
        return float(re.search(r"\d", trace.last_reply) is not None)

    @vf.reward(weight=0.5)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in re.findall(r"\d+", trace.last_reply))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for a in range(1, 20):
            for b in range(1, 10):
                data = Data(prompt=f"What is {a} + {b}?", answer=a + b)  # type: ignore[bad-argument-type]
                yield Sum(data, self.config.task)


__all__ = ["Sums"]  # verifiers looks for this
