"""Time and memory of one call."""

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
    """Enough copies that a call never finds its input in the GPU's cache; one if the tensor would
    not fit anyway."""
    cache_bytes = 0
    if tensor.is_cuda:
        cache_bytes = torch.cuda.get_device_properties(tensor.device).L2_cache_size
    to_fill_twice = -(-2 * cache_bytes // max(tensor.nbytes, 1))  # rounded up
    count = max(1, min(MAX_COPIES, to_fill_twice))
    return [tensor] + [tensor.clone() for _ in range(count - 1)]


def times(call: Call, inputs: Sequence[Tensor], seconds: float) -> Times:
    """Times of as many calls as fit into `seconds`, 3 to 200, after a warm-up; of one call if it
    takes 5 s.

    The calls take the inputs in turn.
    """
    return in_turns([(call, inputs)], seconds)[0]


def in_turns(calls: Sequence[tuple[Call, Sequence[Tensor]]], seconds: float) -> list[Times]:
    """`times` of each call, taken in `TURNS` turns: a drifting clock or a neighbour's load then
    affects all alike."""
    samples: list[list[float]] = []
    calls_per_turn: list[int] = []
    for call, inputs in calls:
        first = _timed(call, inputs[:1])  # may compile, tune or allocate
        if first[0] < SLOW_MS:
            first = _timed(call, inputs[:1])

        if first[0] >= SLOW_MS:
            samples.append(first)
            calls_per_turn.append(0)
        else:
            fitting = int(1e3 * seconds / TURNS / max(first[0], 1e-3))
            samples.append([])
            calls_per_turn.append(max(1, min(MAX_CALLS // TURNS, fitting)))

    for _ in range(TURNS):
        for (call, inputs), count, samples_of_call in zip(
            calls, calls_per_turn, samples, strict=True
        ):
            if count == 0:
                continue
            # The first call of a turn finds caches and allocator as another case left them.
            if count > 1:
                _timed(call, inputs[:1])
            samples_of_call += _timed(call, [inputs[i % len(inputs)] for i in range(count)])
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
        for x in inputs:
            call(x)
            moments.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in pairwise(moments)]

    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(inputs) + 1)]
    events[0].record()
    for x, event in zip(inputs, events[1:], strict=True):
        call(x)
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def peak_bytes(call: Call, x: Tensor) -> int:
    """The most that torch's allocator held during the call, above what it held before.

    On the GPU its own counter; on the CPU the running sum of the profiler's allocation events,
    which sees inside operators. Neither sees workspaces that a library takes from the system.
    """
    if x.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        call(x)
    held = 0
    peak = 0
    events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
