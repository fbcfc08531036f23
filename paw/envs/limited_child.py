"""The child process of `limited.py`. Each request and each answer is one line with a JSON object:

    {"call": "fullmatch", "arguments": ["a+", "aaa"]}
    -> {"value": true}  or  {"problem": "takes more than ..."}

It is started by its path and imports nothing from paw, so it starts in a fraction of a second.
"""

import contextlib
import json
import os
import re
import resource
import select
import signal
import sys
import warnings
from typing import Any

from jsonschema import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

MEMORY = 1 << 30
"""Limit on the address space, in bytes. Python and jsonschema take a tenth of it."""
WATCH_S = 2.0
"""How often the child checks that its parent is alive."""
MESSAGE_CHARS = 300
"""Maximum length of a validator's message."""


def fullmatch(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def schema_problem(schema: dict[str, Any]) -> str:
    """Say what is wrong with a JSON schema; "" if nothing is."""
    try:
        _validator(schema).check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {error.message[:MESSAGE_CHARS]}"
    return ""


def arguments_problem(schema: dict[str, Any], arguments: Any) -> str:
    """Return the first problem of arguments that do not fit the schema; "" if they fit."""
    errors = _validator(schema).iter_errors(arguments)
    first = min(errors, key=lambda error: error.json_path, default=None)
    return first.message[:MESSAGE_CHARS] if first else ""


def _validator(schema: dict[str, Any]) -> Any:
    """Return a validator for a JSON schema that never follows a reference to another address."""
    return validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


CALLS = {
    "fullmatch": fullmatch,
    "schema_problem": schema_problem,
    "arguments_problem": arguments_problem,
}


def answer(call: str, arguments: list[Any], cpu_s: float) -> dict[str, Any]:
    """Answer a call.

    If it takes more CPU time than `cpu_s`, the kernel ends this process, whatever Python is doing.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return {"value": CALLS[call](*arguments)}
    except MemoryError:
        return {"problem": f"needs more than {MEMORY >> 30} GiB of memory"}
    except RecursionError:
        return {"problem": "is nested too deeply, or refers to itself"}
    except Exception as error:  # for example a reference that leads nowhere
        reason = f"{type(error).__name__}: {str(error)[:MESSAGE_CHARS]}"
        return {"problem": f"cannot be applied ({reason})"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def serve(cpu_s: float) -> None:
    """Answer requests until the input ends or the parent is gone."""
    # Terminals and schedulers send these to both processes; the parent handles them.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with contextlib.suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")  # warnings are about patterns whose meaning may change
    parent = os.getppid()
    while True:
        while not select.select([sys.stdin.buffer], [], [], WATCH_S)[0]:
            if os.getppid() != parent:
                return  # the parent is gone, but a process that it forked keeps the pipe open
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = json.loads(line)
        reply = answer(request["call"], request["arguments"], cpu_s)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]))
