"""What `make gpu` measures: each part's command, its rows in the table, and the reader of its
results."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import read

MODEL = "Qwen2.5-0.5B"
HEAD = "151936x896"
"""Vocabulary x width of that model's head."""
UPDATE_KEYS: dict[str, dict[str, str]] = {
    "neither": {},
    "model.compile": {"model.compile": "true"},
    "optim.share_prefixes": {"optim.share_prefixes": "auto"},
    "both": {"model.compile": "true", "optim.share_prefixes": "auto"},
    "neither, flash-attn": {"model.attention": "flash"},
    "neither, torch's varlen": {"model.attention": "varlen"},
}
"""Case -> keys that replace those of PLAIN."""
PLAIN = {
    "model.compile": "false",
    "optim.share_prefixes": "never",
    "optim.micro_batch_tokens": "8192",
}
UPDATE = {"update": "s", "tokens": "tokens/s", "peak": "GiB", "first": "s the first"}
SERVER = {"update": "s", "rollout": "s rollout", "score": "s score", "sync": "s sync"}
KERNEL = {"ms": "ms", "peak_mib": "MiB"}
REFERENCE = {"head": "Llama-3.1-8B", "T": "4096", "mode": "forward + backward"}
"""Columns that the rows of bench/kernels/compare.py must have to be shown."""
IMPLEMENTATIONS = (
    "paw[triton]",
    "paw[cuda]",
    "torch_compile",
    "liger_triton",
    "cut_cross_entropy",
    "quack",
)


@dataclass
class Reading:
    """What the files written by a command say."""

    values: dict[tuple[str, str], float] = field(default_factory=dict)
    """(case, measure) -> measured value."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Case -> why it was not measured, if the files say why."""


@dataclass(frozen=True)
class Part:
    """A process and the rows that it fills."""

    name: str
    command: tuple[str, ...]
    """Arguments of `python`. {out} stands for the file that the process writes."""
    cases: Mapping[str, Mapping[str, str]]
    """Case -> measure -> unit: the rows of the table."""
    read: Callable[[Path, int], Reading]
    """(file that the process wrote, exit code) -> what was measured. The file may be missing."""
    minutes: float
    """The process is stopped after this time."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Module -> what installs it. If one is missing, the part is not run."""
    out: str = ""
    """The file name of {out}."""


def parts(model: str = MODEL) -> list[Part]:
    """Every part, in the order of the table."""
    return [
        Part(
            name="installation",
            command=("-m", "paw", "doctor"),
            cases={"paw doctor": {"exit_code": "as exit code"}},
            read=lambda _, exit_code: Reading({("paw doctor", "exit_code"): exit_code}),
            minutes=5,
        ),
        Part(
            name="kernels against float64",
            command=("-m", "paw", "doctor", "--kernels", "--shape", HEAD),
            cases={"paw doctor --kernels": {"exit_code": "as exit code"}},
            read=lambda _, exit_code: Reading({("paw doctor --kernels", "exit_code"): exit_code}),
            minutes=20,
        ),
        Part(
            name="tests",
            command=("-m", "pytest", "-m", "gpu", "--junitxml", "{out}"),
            cases={"pytest -m gpu": {"passed": "passed", "failed": "failed", "skipped": "skipped"}},
            read=read_tests,
            minutes=20,
            needs={"pytest": "'paw-trainer[test]'"},
            out="tests.xml",
        ),
        Part(
            name="head, Llama-3.1-8B, T 4096",
            command=("bench/kernels/compare.py", "--quick", "--out", "{out}"),
            cases=dict.fromkeys(_kernel_cases(), KERNEL),
            read=read_kernels,
            minutes=20,
            out="kernels.csv",
        ),
        *[_update_part(model, case, PLAIN | keys) for case, keys in UPDATE_KEYS.items()],
        Part(
            name=f"update of {model}, episodes from a vLLM server",
            command=("bench/gpu/server.py", "--model", model, "--out", "{out}"),
            cases={"rollout.ahead 0": SERVER, "rollout.ahead 1": SERVER},
            read=read_server,
            minutes=20,
            needs={"vllm": "'paw-trainer[vllm]'", "aiohttp": "'paw-trainer[servers]'"},
            out="server.json",
        ),
    ]


def _kernel_cases() -> list[str]:
    """The cases of the fused head. Only our own backends save work on dead rows, at f < 1."""
    cases = []
    for implementation in IMPLEMENTATIONS:
        live_shares = ("1.0", "0.4") if implementation.startswith("paw") else ("1.0",)
        cases += [f"{implementation}, f {live_share}" for live_share in live_shares]
    return cases


def _update_part(model: str, case: str, keys: Mapping[str, str]) -> Part:
    """The part that measures one update with these keys."""

    def read_update(path: Path, exit_code: int) -> Reading:
        reading = Reading()
        if path.exists():
            measured = json.loads(path.read_text(encoding="utf-8"))
            reading.values = {(case, measure): measured[measure] for measure in UPDATE}
        return reading

    key_words = [f"{key}={value}" for key, value in keys.items()]
    return Part(
        name=f"update of {model}",
        command=("bench/gpu/updates.py", "--model", model, "--out", "{out}", "--keys", *key_words),
        cases={case: UPDATE},
        read=read_update,
        minutes=15,
        needs={"flash_attn": "flash-attn"} if keys.get("model.attention") == "flash" else {},
        out=f"update-{list(UPDATE_KEYS).index(case)}.json",
    )


def read_tests(path: Path, exit_code: int) -> Reading:
    """The numbers of tests in a JUnit file. Tests with errors count as failed."""
    case = "pytest -m gpu"
    if not path.exists():
        return Reading()
    totals = {"tests": 0, "failed": 0, "skipped": 0}
    for test_suite in ET.parse(path).iter("testsuite"):
        totals["tests"] += int(test_suite.get("tests", "0"))
        totals["failed"] += int(test_suite.get("failures", "0"))
        totals["failed"] += int(test_suite.get("errors", "0"))
        totals["skipped"] += int(test_suite.get("skipped", "0"))
    passed = totals["tests"] - totals["failed"] - totals["skipped"]
    values = {"passed": passed, "failed": totals["failed"], "skipped": totals["skipped"]}
    return Reading({(case, measure): count for measure, count in values.items()})


def read_kernels(path: Path, exit_code: int) -> Reading:
    """Times and memory at the reference point, from a table of bench/kernels/compare.py."""
    reading = Reading()
    for record in read(path) if path.exists() else []:
        is_reference = REFERENCE.items() <= record.items()
        if not is_reference or record["implementation"] not in IMPLEMENTATIONS:
            continue
        if record["dead"] == "known":
            continue
        case = f"{record['implementation']}, f {record['live']}"
        if record["error"]:
            reading.reasons[case] = record["error"]
        elif record["passes"] == "no":
            reading.reasons[case] = "its gradients are inaccurate"
        else:
            for measure in KERNEL:
                reading.values[case, measure] = float(record[measure])
    return reading


def read_server(path: Path, exit_code: int) -> Reading:
    """Seconds of an update and of its phases, for each rollout.ahead that finished."""
    reading = Reading()
    if path.exists():
        for ahead, seconds in json.loads(path.read_text(encoding="utf-8")).items():
            for measure in SERVER:
                reading.values[f"rollout.ahead {ahead}", measure] = seconds[measure]
    return reading
