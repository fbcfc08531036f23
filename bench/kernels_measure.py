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
TURNS = 5


class Times(NamedTuple):
    """Milliseconds."""

    median: float
    low: float
    """20th percentile."""
    high: float
    """80th."""
    runs: int


def copies(tensor: Tensor) -> list[Tensor]:
    """Enough of them that a call finds none in the cache when its turn comes; one where it would not fit anyway."""
    cache = torch.cuda.get_device_properties(tensor.device).L2_cache_size if tensor.is_cuda else 0
    n = max(1, min(4, -(-2 * cache // max(tensor.nbytes, 1))))
    return [tensor] + [tensor.clone() for _ in range(n - 1)]


def times(call: Call, inputs: Sequence[Tensor], seconds: float) -> Times:
    """After a warm-up, as many calls as fit into `seconds`, 3 to 200, over the inputs in turn; one if it takes 5 s."""
    return in_turns([(call, inputs)], seconds)[0]


def in_turns(calls: Sequence[tuple[Call, Sequence[Tensor]]], seconds: float) -> list[Times]:
    """`times` of each, in `TURNS` turns: a clock that drifts, or a neighbour's load, then meets all alike."""
    found: list[list[float]] = []
    numbers: list[int] = []
    for call, inputs in calls:
        first = _timed(call, inputs[:1])  # it may compile, tune or allocate
        if first[0] < SLOW_MS:
            first = _timed(call, inputs[:1])
        fit = max(1, min(200 // TURNS, int(1e3 * seconds / TURNS / max(first[0], 1e-3))))
        found.append(first if first[0] >= SLOW_MS else [])
        numbers.append(0 if found[-1] else fit)
    for _ in range(TURNS):
        for (call, inputs), n, samples in zip(calls, numbers, found, strict=True):
            if n > 1:  # the first of a turn finds caches and allocator as another left them
                _timed(call, inputs[:1])
            if n:
                samples += _timed(call, [inputs[i % len(inputs)] for i in range(n)])
    return [_of(samples) for samples in found]


def _of(samples: list[float]) -> Times:
    if len(samples) == 1:
        return Times(samples[0], samples[0], samples[0], 1)
    cuts = statistics.quantiles(samples, n=5, method="inclusive")
    return Times(statistics.median(samples), cuts[0], cuts[3], len(samples))


def _timed(call: Call, inputs: Sequence[Tensor]) -> list[float]:
    if not inputs[0].is_cuda:
        marks = [time.perf_counter()]
        for x in inputs:
            call(x)
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(marks)]
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(inputs) + 1)]
    events[0].record()
    for x, event in zip(inputs, events[1:], strict=True):
        call(x)
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def peak_bytes(call: Call, x: Tensor) -> int:
    """The most that torch's allocator held during the call above what it held before.

    On the GPU its own counter; on the CPU the running sum of the profiler's allocation events, which sees inside
    operators. Workspaces that a library takes from the system are not seen on either.
    """
    if x.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call(x)
    held = top = 0
    events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            top = max(top, held)
    return top
