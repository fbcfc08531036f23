"""Checks the tools that an environment offers, and calls to them.

Tools are OpenAI function schemas.
"""

import json
from collections.abc import Sequence
from typing import Any

from paw.envs.limited import CannotApply, arguments_problem, schema_problem
from paw.errors import EnvironmentFailure, clean, short_repr
from paw.types import Reply, ToolCall

Tool = dict[str, Any]
OPENAI = {"type", "function", "name", "description", "parameters", "strict"}
"""Keys of a tool in OpenAI's format."""
MCP = {
    "name",
    "title",
    "description",
    "inputSchema",
    "outputSchema",
    "annotations",
    "icons",
    "execution",
    "_meta",
}
"""Keys of a tool in the format of the Model Context Protocol."""


def checked_tools(tools: Any) -> list[Tool]:
    """Return the tools as {"type": "function", "function": {"name", "description", "parameters"}}.

    A bare function is wrapped. An MCP tool is accepted too, and its `inputSchema` becomes
    `parameters`. Raises ValueError if `tools` is not a list of schemas, if JSON cannot hold it, or
    if two tools have the same name. Also raises it if a tool's schema is invalid, under another
    key, or takes too long to apply.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(
            f"tools is {short_repr(tools)}; it must be a list of OpenAI function schemas"
        )
    checked: dict[str, Tool] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise ValueError(f"tools[{i}] has no name: {short_repr(tool)}; set its 'name', a text")
        if name in checked:
            raise ValueError(f"tools[{i}]: there are two tools '{name}'; rename one")
        function = _as_openai(name, tool, function)
        checked[name] = {"type": "function", "function": _checked_function(name, function)}
    return list(checked.values())


def _checked_function(name: str, function: Tool) -> Tool:
    """Return a copy of `function` as JSON holds it. Raises ValueError if its schema is invalid."""
    try:
        function = json.loads(json.dumps(function, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"tool '{name}' cannot be written as JSON: {error}") from None
    schema = function["parameters"]
    if isinstance(schema, dict) and schema.get("type", "object") == "object":
        problem = schema_problem(schema)
    else:
        problem = short_repr(schema)
    if problem:
        raise ValueError(
            f"tool '{name}': its parameters are not the JSON schema of an object: {problem}"
        )
    return function


def _as_openai(name: str, tool: Tool, function: Tool) -> Tool:
    """Return `function` with the schema of its arguments as "parameters".

    Raises ValueError if the schema is under another key.
    """
    parameters = function.get("parameters")
    if "inputSchema" in function:
        schema = function["inputSchema"]
        if parameters and parameters != schema:
            raise ValueError(
                f"tool '{name}' has 'parameters' and another 'inputSchema'; give one of them"
            )
        other_keys = {*function} - MCP - {"parameters"}
        return {
            "name": name,
            "description": function.get("description") or "",
            "parameters": schema,
            **{key: value for key, value in function.items() if key in other_keys},
        }

    unknown_keys = {*function} - OPENAI - MCP
    if function is not tool:
        unknown_keys |= {*tool} - {"type", "function", "strict"}
    if unknown_keys and not parameters:
        # One of the other keys may be the schema.
        keys = ", ".join(short_repr(key) for key in sorted(unknown_keys, key=str))
        raise ValueError(
            f"tool '{name}' has {keys}; the schema of its arguments must be "
            "'parameters' (OpenAI) or 'inputSchema' (MCP)"
        )
    return {
        "description": "",
        **function,
        "parameters": parameters or {"type": "object", "properties": {}},
    }


def checked_reply(response: str, tools: Sequence[Tool]) -> Reply:
    """Return `response` with the first problem of its calls.

    Problems are a call to a tool that does not exist, and arguments that do not fit its schema.
    """
    reply = response if isinstance(response, Reply) else Reply(response)
    problem = reply.problem
    for call in reply.calls:
        if problem:
            break
        problem = _problem(call, tools)
    return Reply(reply, reply.content, reply.calls, problem)


def _problem(call: ToolCall, tools: Sequence[Tool]) -> str:
    """Say what is wrong with a call, in one line; "" if nothing is.

    Raises EnvironmentFailure if the tool's schema cannot be applied.
    """
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if call.name not in schemas:
        return f"there is no tool {short_repr(call.name)}; there are {', '.join(schemas)}"
    try:
        problem = arguments_problem(schemas[call.name], call.arguments)
    except (TypeError, ValueError, RecursionError) as error:
        return f"the arguments of '{call.name}' cannot be written as JSON: {clean(error)}"
    except CannotApply as error:
        raise EnvironmentFailure(
            f"the schema of the tool '{call.name}' {error}, given {short_repr(call.arguments)}"
        ) from None
    return f"the call of '{call.name}' does not fit its schema: {problem}" if problem else ""
