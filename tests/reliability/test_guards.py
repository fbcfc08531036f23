"""No update from non-finite numbers, a warning on the collapse signature, a clean stop on
signals."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from paw.config.sections import AdvantageConfig
from paw.distributed.ranks import out_of_memory
from paw.errors import UserError
from paw.guards import TrainingStopped, UpdateGuard, alarms, collapse_warning, memory_message
from paw.rollouts.engines import find_engine
from paw.rundir.signals import StopSignal


def test_a_non_finite_loss_or_norm_is_refused_and_k_in_a_row_stop():
    guard = UpdateGuard(max_skipped=3)
    for not_finite in (math.nan, math.inf, -math.inf):  # never three in a row
        assert not guard.allows(loss=not_finite, grad_norm=1.0)
        assert not guard.allows(loss=1.0, grad_norm=not_finite)
        assert guard.allows(loss=-1.0, grad_norm=0.0)
    assert guard.skipped == 6
    guard.allows(loss=1.0, grad_norm=math.nan)
    resumed = UpdateGuard(max_skipped=3)
    resumed.load_state(guard.state())  # the count survives a resume
    resumed.allows(loss=1.0, grad_norm=math.nan)
    with pytest.raises(TrainingStopped, match=r"3 optimizer steps in a row.*optim\.lr") as caught:
        resumed.allows(loss=1.0, grad_norm=math.nan)
    assert resumed.skipped == 9
    assert isinstance(caught.value, UserError)
    assert "\n" not in str(caught.value)


def row(valid: float, success: float, entropy: float | None) -> dict[str, float | None]:
    return {"health/valid_actions": valid, "success/all": success, "policy/entropy": entropy}


HEALTHY = [row(0.8, 0.3, 1.0)] * 6
COLLAPSED = row(1.0, 0.0, 0.01)
NO_ALARM = {
    "from the start": [COLLAPSED] * 20,  # a model that never succeeded has nothing to lose
    "mastered": HEALTHY + [row(1.0, 0.9, 0.01)] * 8,  # learned the game: sure and right
    "invalid": HEALTHY + [row(0.5, 0.0, 0.01)] * 8,
    "entropy left": HEALTHY + [row(1.0, 0.0, 0.5)] * 8,
    "some success": HEALTHY + [COLLAPSED, row(1.0, 0.1, 0.01)] * 4,
    "no metrics": [{"eval/success": 0.5}] * 8,
    "nulls": [row(0.8, 0.3, None)] * 12,
}


def test_collapse_is_told_once_when_the_signature_completes():
    history = HEALTHY + [COLLAPSED] * 8
    warned = [collapse_warning(history[: length + 1]) is not None for length in range(len(history))]
    assert [length for length, has_warned in enumerate(warned) if has_warned] == [len(HEALTHY) + 4]
    mixed = []
    for line in history[:11]:
        mixed += [{}, line]  # rows without the metrics do not count
    message = collapse_warning(mixed) or ""
    assert "advantage.penalty_only" in message
    assert "\n" not in message
    # PPO has no such key.
    assert "penalty_only" not in (collapse_warning(mixed, in_groups=False) or "penalty_only")
    for name, other in NO_ALARM.items():
        assert all(collapse_warning(other[: length + 1]) is None for length in range(len(other))), (
            name
        )


def test_returns_above_the_largest_are_told_once():
    history = [{"reward/mean": value} for value in (0.5, 3.0, 4.0)]

    def warnings(count, **changes):
        wm_config = SimpleNamespace(**{"enabled": True, "weight": "adaptive", **changes})
        config = SimpleNamespace(wm=wm_config, advantage=AdvantageConfig(type="grpo"))
        return list(alarms(history[:count], config, reward_max=1.0))

    assert [len(warnings(count)) for count in range(4)] == [0, 0, 1, 0]
    assert warnings(2)[0].startswith(
        "warning: the mean return of episodes is 3, above the environment's reward_max = 1:"
    )
    assert not warnings(2, weight=1.0)
    assert not warnings(2, enabled=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_handlers_return_to_what_they_were(capfd, number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.name == number.name
        during = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        assert during == (signal.SIG_DFL, signal.default_int_handler)  # a second one stops at once
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert f"{number.name}: finishing this update" in capfd.readouterr().err


def test_a_thread_trains_without_handlers():
    before = signal.getsignal(signal.SIGINT)
    entered = []

    def enter():
        with StopSignal() as stop:
            entered.append((stop.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [(False, before)]


TERMINAL = """
import hashlib, os, signal, threading, time
from paw.rundir import signals

def close(times):
    for _ in range(times):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGHUP)

signals.GRACE_S = 0.3
with signals.StopSignal() as stop:
    threading.Thread(target=close, args=(2,)).start()
    ended = time.monotonic() + 1
    while time.monotonic() < ended:  # no handler of Python's runs meanwhile
        hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)
    close(1)
    assert stop.requested
print("saved")
"""


def test_a_closed_terminal_tells_twice_and_stops_nothing_at_once():
    finished = subprocess.run(
        [sys.executable, "-c", TERMINAL], capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 0
    assert finished.stdout == "saved\n"
    assert "stopped at once" not in finished.stderr


def test_the_parent_of_a_server_leaves_signals_to_the_trainer():
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
    watched = [sys.executable, "-m", "paw.rollouts.engines.watch", *command]
    child = subprocess.Popen(watched, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin
    assert child.stdout
    assert child.stdout.read(1)  # the server has begun
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        child.send_signal(number)
    time.sleep(0.3)
    assert child.poll() is None
    child.stdin.close()  # as the trainer's end does
    assert child.wait(20) == 128 + signal.SIGTERM
    child.stdout.close()


def test_signals_of_a_forked_child_are_none_of_the_runs():
    """As a pool does, which ends its workers by SIGTERM."""
    context = multiprocessing.get_context("fork")
    with StopSignal() as stop:
        for _ in range(3):
            with context.Pool(2) as pool:
                assert pool.map(abs, [-1, 2]) == [1, 2]
        child = context.Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


def test_an_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("phase", "engine", "advice"),
    [
        ("rollout", "vllm", "--engine.gpu_memory_utilization"),
        ("rollout", "transformers", "--engine.max_batch_tokens"),
        ("score", "vllm", "--optim.micro_batch_tokens"),
        (
            "eval",
            "server",  # has no memory on the trainer's GPUs
            "--optim.micro_batch_tokens, --model.checkpointing full or --optim.offload true",
        ),
        (
            "start",
            "vllm",
            "--engine.gpu_memory_utilization, --optim.name flash-adamw, "
            "--policy.offload_reference true or more --gpus",
        ),
    ],
)
def test_out_of_memory_names_the_keys_of_the_engine_in_use(phase, engine, advice):
    keys = find_engine(engine).memory_keys
    message = memory_message(phase, update=3, rank=0, peak_gib=79.1, saved=2, engine_keys=keys)
    assert f"peak 79.1 GiB: lower or set {advice} (`paw plan` finds" in message


def test_what_counts_as_out_of_memory():
    for error, expected in (
        (
            RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139"),
            True,
        ),  # vLLM waking up
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"
            ),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (
            RuntimeError("CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:139"),
            False,
        ),
        (ValueError("out of memory"), False),
    ):
        assert out_of_memory(error) is expected
