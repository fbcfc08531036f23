"""A conversation with a tool, and a small model that learns when to call it.

The model reads "Reach 23." and calls `add` with 1, 5 or 10, at most eight times. PaW finds the
parser of the model's own format, checks arguments against the schema, and tells the model what is
wrong with a broken call.

Needs: pip install paw-trainer
Took: 81 s of processor time on one thread of an AMD EPYC, including the start model.
Change first: `tools` and `call`. A pretrained model (`--model.path NAME`) needs no `oracle`; its
chat template has to support tools, as those of Qwen3 and Llama 3 do.
"""

import paw

NUMBERS = [1, 5, 10]
N = {"n": {"type": "integer", "enum": NUMBERS}}
ADD = {"type": "object", "properties": N, "required": ["n"]}


class Adder(paw.Conversation):
    tasks = [paw.Task(f"reach {goal}", payload=goal) for goal in range(10, 40)]
    tools = [{"name": "add", "description": "Adds n to the sum.", "parameters": ADD}]

    def begin(self, task):
        self.left = task.payload
        return [{"role": "user", "content": f"Reach {self.left}."}]

    def call(self, call):
        self.left -= call.arguments["n"]
        won = self.left == 0
        result = f"{self.left} left."
        return paw.Outcome(result, reward=float(won), done=self.left <= 0, won=won)

    def say(self, text):  # an answer without a call ends the conversation
        return paw.Outcome("", reward=0.0, done=True, won=False)

    # For the small model: what an expert would do, and what is possible at all.

    def oracle(self):
        return self.format_action(max(n for n in NUMBERS if n <= self.left))

    def admissible_actions(self):
        return [str(n) for n in NUMBERS]

    def format_action(self, action):
        return paw.Reply.of("", paw.ToolCall("add", {"n": int(action)}))


def main(words):
    changes = {"env.name": Adder, "env.max_turns": 8, "eval.games": 0, "eval.attempts": 32}
    changes |= {"run.updates": 30, "rollout.tasks": 8, "run.name": "tool-conversation"}
    changes |= {"warmup.max_steps": 60, "warmup.corpus_turns": 1000}
    report = paw.train(paw.load("quickstart", words, **changes), numbered=True)
    success = [*paw.metric(report.parent, "eval/success").values()]
    print(f"Held-out goals reached: {success[0]:.0%} -> {success[-1]:.0%}. {report}")


if __name__ == "__main__":
    paw.script(main)
