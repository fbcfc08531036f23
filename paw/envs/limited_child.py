"""The child process of `limited.py`: one JSON object a line, request and answer in turn.

    {"call": "fullmatch", "arguments": ["a+", "aaa"]}  ->  {"value": true}  or  {"problem": "takes more than ..."}

It is started by its path and imports nothing of paw, so that it is there in a fraction of a second.
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
"""Bytes of address space, of which Python and jsonschema take a tenth."""
WATCH_S = 2.0
"""Seconds between two looks at whether the parent is still there."""
MESSAGE_CHARS = 300


def fullmatch(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def schema_problem(schema: dict[str, Any]) -> str:
    """What is wrong with a JSON schema; "" if it is one."""
    try:
        _validator(schema).check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {error.message[:MESSAGE_CHARS]}"
    return ""


def arguments_problem(schema: dict[str, Any], arguments: Any) -> str:
    """What does not fit the schema, the first place of it; "" if all does."""
    errors = _validator(schema).iter_errors(arguments)
    first = min(errors, key=lambda error: error.json_path, default=None)
    return first.message[:MESSAGE_CHARS] if first else ""


def _validator(schema: dict[str, Any]) -> Any:
    """Of JSON schema; it opens no address."""
    return validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


CALLS = {
    "fullmatch": fullmatch,
    "schema_problem": schema_problem,
    "arguments_problem": arguments_problem,
}


def answer(call: str, arguments: list[Any], cpu_s: float) -> dict[str, Any]:
    """The kernel's timer ends this process if the call takes more CPU time than `cpu_s`, whatever Python does then."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return {"value": CALLS[call](*arguments)}
    except MemoryError:
        return {"problem": f"needs more than {MEMORY >> 30} GiB of memory"}
    except RecursionError:
        return {"problem": "is nested too deeply, or refers to itself"}
    except Exception as error:  # such as a reference to nowhere
        return {
            "problem": f"cannot be applied ({type(error).__name__}: {str(error)[:MESSAGE_CHARS]})"
        }
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def serve(cpu_s: float) -> None:
    for number in (
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGTERM,
    ):  # of the terminal and of schedulers: the parent's
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with contextlib.suppress(OSError, ValueError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")  # of patterns, whose meaning will change some day
    parent = os.getppid()
    while True:
        while not select.select([sys.stdin.buffer], [], [], WATCH_S)[0]:
            if (
                os.getppid() != parent
            ):  # it is gone, and a process that it forked keeps the pipe open
                return
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = json.loads(line)
        reply = answer(request["call"], request["arguments"], cpu_s)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]))
