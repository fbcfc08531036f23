"""Tools that an environment offers, as OpenAI function schemas, and calls of them: what is wrong, in one line each."""

import json
from collections.abc import Sequence
from typing import Any

from paw.envs.limited import CannotApply, arguments_problem, schema_problem
from paw.errors import EnvironmentFailure, clean, shown
from paw.types import Reply, ToolCall

Tool = dict[str, Any]
OPENAI = {"type", "function", "name", "description", "parameters", "strict"}
"""Keys of a tool as OpenAI has them."""
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
"""Keys of a tool as the Model Context Protocol has them."""


def checked_tools(tools: Any) -> list[Tool]:
    """As {"type": "function", "function": {"name", "description", "parameters"}}; a bare function
    is wrapped, and a tool of MCP is read, whose `inputSchema` is `parameters`.

    Raises ValueError for what is no list of schemas, cannot be JSON, has a name twice, or a schema
    that is none, that stands elsewhere, or that takes too long to apply.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"tools is {shown(tools)}; it must be a list of OpenAI function schemas")
    found: dict[str, Tool] = {}
    for place, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise ValueError(f"tools[{place}] has no name: {shown(tool)}; set its 'name', a text")
        if name in found:
            raise ValueError(f"tools[{place}]: there are two tools '{name}'; rename one")
        function = _as_openai(name, tool, function)
        try:
            function = json.loads(json.dumps(function, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"tool '{name}' cannot be written as JSON: {error}") from None
        schema = function["parameters"]
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise ValueError(
                f"tool '{name}': its parameters are no JSON schema of an object: {shown(schema)}"
            )
        if problem := schema_problem(schema):
            raise ValueError(
                f"tool '{name}': its parameters are no JSON schema of an object: {problem}"
            )
        found[name] = {"type": "function", "function": function}
    return list(found.values())


def _as_openai(name: str, tool: Tool, function: Tool) -> Tool:
    """`function` with the schema of its arguments as "parameters".

    ValueError if that stands under another key.
    """
    written = function.get("parameters")
    if "inputSchema" in function:
        schema = function["inputSchema"]
        if written and written != schema:
            raise ValueError(
                f"tool '{name}' has 'parameters' and another 'inputSchema'; give one of them"
            )
        kept = {key: value for key, value in function.items() if key not in MCP | {"parameters"}}
        return {
            "name": name,
            "description": function.get("description") or "",
            "parameters": schema,
            **kept,
        }
    others = {*function} - OPENAI - MCP
    if function is not tool:
        others |= {*tool} - {"type", "function", "strict"}
    if not written and others:
        wanted = "the schema of its arguments must be 'parameters' (OpenAI) or 'inputSchema' (MCP)"
        raise ValueError(
            f"tool '{name}' has {', '.join(map(shown, sorted(others, key=str)))}; {wanted}"
        )
    return {
        "description": "",
        **function,
        "parameters": written or {"type": "object", "properties": {}},
    }


def checked_reply(response: str, tools: Sequence[Tool]) -> Reply:
    """`response` with the first problem of its calls: a tool that is not there, arguments that break its schema."""
    reply = response if isinstance(response, Reply) else Reply(response)
    problem = reply.problem or next(
        filter(None, (_problem(call, tools) for call in reply.calls)), ""
    )
    return Reply(reply, reply.content, reply.calls, problem)


def _problem(call: ToolCall, tools: Sequence[Tool]) -> str:
    known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if call.name not in known:
        return f"there is no tool {shown(call.name)}; there are {', '.join(known)}"
    try:
        problem = arguments_problem(known[call.name], call.arguments)
    except (TypeError, ValueError, RecursionError) as error:
        return f"the arguments of '{call.name}' cannot be written as JSON: {clean(error)}"
    except CannotApply as error:
        raise EnvironmentFailure(
            f"the schema of the tool '{call.name}' {error}, given {shown(call.arguments)}"
        ) from None
    return f"the call of '{call.name}' does not fit its schema: {problem}" if problem else ""
