"""Time and memory of a call."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[[Tensor], object]
SLOW_MS = 5000
"""A call that takes this long is timed once."""
TURNS = 5
MAX_COPIES = 4
MAX_CALLS = 200


class Times(NamedTuple):
    """Milliseconds."""

    median: float
    low: float
    """20th percentile."""
    high: float
    """80th percentile."""
    runs: int


def copies(tensor: Tensor) -> list[Tensor]:
    """Enough copies that a call never finds its input in the GPU's cache.

    One copy is enough if the tensor does not fit into the cache anyway.
    """
    cache_bytes = 0
    if tensor.is_cuda:
        cache_bytes = torch.cuda.get_device_properties(tensor.device).L2_cache_size
    to_fill_twice = -(-2 * cache_bytes // max(tensor.nbytes, 1))  # rounded up
    copy_count = max(1, min(MAX_COPIES, to_fill_twice))
    return [tensor] + [tensor.clone() for _ in range(copy_count - 1)]


def times(call: Call, inputs: Sequence[Tensor], seconds: float) -> Times:
    """Times of as many calls as fit into `seconds`, at most 200, after a warm-up.

    A call that takes 5 s is timed once. The calls use the inputs in turn.
    """
    return in_turns([(call, inputs)], seconds)[0]


def in_turns(calls: Sequence[tuple[Call, Sequence[Tensor]]], seconds: float) -> list[Times]:
    """`times` of each call. The calls take `TURNS` turns, so that a drifting clock or another load
    on the machine affects all of them alike."""
    samples: list[list[float]] = []
    calls_per_turn: list[int] = []
    for call, inputs in calls:
        first_times = _timed(call, inputs[:1])  # may compile, tune or allocate
        if first_times[0] < SLOW_MS:
            first_times = _timed(call, inputs[:1])

        if first_times[0] >= SLOW_MS:
            samples.append(first_times)
            calls_per_turn.append(0)
        else:
            fitting = int(1e3 * seconds / TURNS / max(first_times[0], 1e-3))
            samples.append([])
            calls_per_turn.append(max(1, min(MAX_CALLS // TURNS, fitting)))

    for _ in range(TURNS):
        for (call, inputs), calls_in_turn, samples_of_call in zip(
            calls, calls_per_turn, samples, strict=True
        ):
            if calls_in_turn == 0:
                continue
            # Another case has left the caches and the allocator in its own state.
            if calls_in_turn > 1:
                _timed(call, inputs[:1])
            samples_of_call += _timed(call, [inputs[i % len(inputs)] for i in range(calls_in_turn)])
    return [_summary(samples_of_call) for samples_of_call in samples]


def _summary(samples: list[float]) -> Times:
    if len(samples) == 1:
        return Times(median=samples[0], low=samples[0], high=samples[0], runs=1)
    quintiles = statistics.quantiles(samples, n=5, method="inclusive")
    return Times(
        median=statistics.median(samples), low=quintiles[0], high=quintiles[3], runs=len(samples)
    )


def _timed(call: Call, inputs: Sequence[Tensor]) -> list[float]:
    """Milliseconds of a call on each input, one after another."""
    if not inputs[0].is_cuda:
        moments = [time.perf_counter()]
        for tensor in inputs:
            call(tensor)
            moments.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in pairwise(moments)]

    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(inputs) + 1)]
    events[0].record()
    for tensor, end_event in zip(inputs, events[1:], strict=True):
        call(tensor)
        end_event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def peak_bytes(call: Call, tensor: Tensor) -> int:
    """The most bytes that torch's allocator held during the call, above what it held before.

    On a GPU this is the allocator's own counter. On a CPU it is the running sum of the profiler's
    allocation events, which include those inside operators. Neither includes workspaces that a
    library takes from the system.
    """
    if tensor.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(tensor)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        call(tensor)
    held_bytes = 0
    peak_held_bytes = 0
    events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in events:
        if event.name() == "[memory]":
            held_bytes += event.nbytes()
            peak_held_bytes = max(peak_held_bytes, held_bytes)
    return peak_held_bytes
