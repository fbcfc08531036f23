"""An agent written with openai's client. It does not know about PaW."""

import json
import os
from typing import Any

from openai import OpenAI

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add n to the sum. It starts at 0.",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
        },
    },
}

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
task = json.loads(os.environ["PAW_TASK"])
messages: list[Any] = [{"role": "user", "content": task["question"]}]
total = 0
for _ in range(4):
    completion = client.chat.completions.create(model="gpt-5", messages=messages, tools=[ADD])
    message = completion.choices[0].message
    messages.append(message)
    calls: list[Any] = message.tool_calls or []
    for call in calls:
        total += json.loads(call.function.arguments).get("n", 0)
        result = f"the sum is {total}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not calls:
        break

print(json.dumps({"reward": float(total == task["goal"])}))
