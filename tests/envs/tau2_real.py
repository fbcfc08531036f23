"""Plays the real tau2-bench, in an interpreter that has it: `python tau2_real.py DOMAIN`. Prints
one JSON line per task.

The customer is a script instead of an LLM. It states the request and leaves once it is answered.
The agent makes the tool calls that the task lists. In every tenth task, it omits the last call that
changes anything.
"""

import json
import sys

from tau2.data_model.message import UserMessage
from tau2.registry import registry
from tau2.user import user_simulator

from paw.config.sections import Config
from paw.envs import make_factory
from paw.envs.base import eval_tasks


def customer(model=None, messages=(), **_):
    # Roles are swapped: these are the customer's own messages.
    asked = sum(message.role == "assistant" for message in messages)
    return UserMessage(
        role="user", content="###STOP###" if asked else "Hello, I need help.", cost=0.0
    )


user_simulator.generate = customer
env = {
    "name": "tau2",
    "domain": sys.argv[1],
    "train_split": "train",
    "eval_split": "test",
    "max_turns": 60,
}
config = Config.model_validate(
    {"model": {"path": "-"}, "env": {**env, "think": False, "reward": 1.0}}
)
factory = make_factory(config)
known = {task.id: task for task in registry.get_tasks_loader(sys.argv[1])()}
tasks = eval_tasks(factory, "train", 0, 0) + eval_tasks(factory, "test", 0, 0)
for number, task in enumerate(tasks):
    criteria = known[task.payload].evaluation_criteria
    if criteria.nl_assertions:  # an LLM judges this criterion
        print(json.dumps({"task": task.id, "judged": True}))
        continue
    environment = factory.make()
    calls = criteria.actions or []
    writes = [
        act for act in calls if not act.name.startswith(("get_", "find_", "list_", "calculate"))
    ]
    leaves = number % 10 == 0 and bool(writes)
    if leaves:
        calls = [act for act in calls if act is not writes[-1]]
    first = environment.reset(task)
    answers = []
    for act in calls:
        call = json.dumps({"name": act.name, "arguments": act.arguments})
        answers.append(environment.step(environment.format_action(call)))
    shown = environment.context()
    end = environment.step(environment.format_action("Done."))
    told = {"first": first, "seen": all(said.observation in shown for said in answers), "tool": all(
        said.valid and not said.done and said.observation.startswith("tool: ") for said in answers)}  # fmt: skip
    about = {"task": task.id, "judged": False, "incomplete": leaves, "calls": len(calls), **told}
    print(
        json.dumps(
            {
                **about,
                "done": end.done,
                "won": end.won,
                "reward": end.reward,
                "last": end.observation,
            }
        )
    )
print(json.dumps(factory.fingerprint()))
