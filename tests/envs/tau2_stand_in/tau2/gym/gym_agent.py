"""`AgentGymEnv` with its constructor, `reset`, `step` and `info`; the user is a script instead of
an LLM.

The user wants order W<task id> cancelled and leaves when the agent writes after that. `user_llm`
says what breaks.
"""

import json
import time

from tau2.registry import registry


class Tool:
    def __init__(self, name, **parameters):
        self.name = name
        properties = {key: {"type": kind} for key, kind in parameters.items()}
        function = {
            "name": name,
            "description": f"To {name}.",
            "parameters": {"properties": properties},
        }
        self.openai_schema = {"type": "function", "function": function}


class AgentGymEnv:
    def __init__(
        self,
        domain: str,
        task_id: str,
        max_steps: int = 100,
        solo_mode: bool = False,
        user_llm: str | None = None,
        user_llm_args: dict | None = None,
        all_messages_as_observation: bool = False,
    ):
        self.domain = domain
        self.task_id = task_id
        self.max_steps = max_steps
        self.user_llm = user_llm
        self.actions = []
        self.run = {}
        self.cancelled = False

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        (self.scenario,) = (
            task for task in registry.get_tasks_loader(self.domain)() if task.id == self.task_id
        )
        if self.user_llm == "down":  # the real one swallows what its thread raises
            return "", self._info()
        return f"user: Hi, please {self.scenario.user_scenario}.", self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.actions.append(action)
        if self.user_llm == "slow":
            time.sleep(1.0)
        if self.user_llm == "raises":
            raise RuntimeError("It is not the agent's turn to act.")
        if self.user_llm == "crashes":
            return "", 0.0, True, False, self._info()
        if self.user_llm == "unreachable":
            return self._end("", "infrastructure_error")
        try:
            call = json.loads(action)
        except ValueError:
            if self.cancelled or "###STOP###" in action:
                return self._end("user: Thank you. ###STOP###", "user_stop")
            return "user: As I said,\nthe order.", 0.0, False, False, self._info()
        assert call.keys() == {"name", "arguments"}
        if call["name"] == "done":
            return self._end("", "agent_stop")
        order = call["arguments"].get("order")
        self.cancelled |= call["name"] == "cancel" and order == self.task_id
        return f'tool: {{"order": "{order}"}}', 0.0, False, False, self._info()

    def _end(self, text, reason):
        self.run = {"termination_reason": reason}
        return text, float(self.cancelled), True, False, self._info() | {"reward_info": "{}"}

    def _info(self):
        tools = [Tool("find", order="string"), Tool("cancel", order="string"), Tool("done")]
        return {
            "task": self.scenario,
            "simulation_run": json.dumps(self.run, indent=2),
            "tools": tools,
            "policy": "Cancel orders on request.\n",
        }
