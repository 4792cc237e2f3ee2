"""How benchmarks measure: peers interleaved in one run, and the machine's own limits beside them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_GEMM_SIZE = 2048
_COPY_ELEMENTS = 16 * 1024**2


@dataclass(frozen=True)
class Times:
    """Seconds of each call of one function, sorted.

    Args:
        seconds: one a call.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Half of the calls took no longer."""
        return statistics.median(self.seconds)

    def quantile(self, share: float) -> float:
        """What that share of the calls did not exceed."""
        return self.seconds[min(len(self.seconds) - 1, int(share * len(self.seconds)))]

    def __str__(self) -> str:
        low, high = self.quantile(0.2), self.quantile(0.8)
        return f"{self.median * 1e3:.3f} ms (p20 {low * 1e3:.3f}, p80 {high * 1e3:.3f}, {len(self.seconds)} calls)"


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    budget_s: float,
    least_rounds: int = 3,
    most_rounds: int = 200,
    warm_up: bool = True,
) -> dict[str, Times]:
    """Call each function once a round, so that whatever the machine does meanwhile falls on all of them.

    Args:
        functions: by name.
        budget_s: no round begins after this, once there were `least_rounds`.
        least_rounds: rounds whatever they take.
        most_rounds: rounds at most.
        warm_up: whether each is called once before, unmeasured.

    Returns:
        Times by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    with torch.inference_mode():
        for function in functions.values() if warm_up else ():
            function()
        started = time.perf_counter()
        for done in range(most_rounds):
            if done >= least_rounds and time.perf_counter() - started > budget_s:
                break
            for name, function in functions.items():
                before = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - before)
    return {name: Times(tuple(sorted(values))) for name, values in seconds.items()}


def interleaved_with_slow(
    fast: Mapping[str, Callable[[], object]],
    slow: Mapping[str, Callable[[], object]],
    rounds: int = 1,
    fast_calls: int = 4,
) -> dict[str, Times]:
    """Peers that take seconds a call: each once a round, without a call before, and the fast ones before each of them.

    Args:
        fast: by name.
        slow: by name.
        rounds: of all slow ones.
        fast_calls: of each fast one, before each slow one.

    Returns:
        Times by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in (*fast, *slow)}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, function in slow.items():
                warm = any(seconds.values())
                for fast_name, times in interleaved(fast, 0.0, fast_calls, warm_up=not warm).items():
                    seconds[fast_name] += times.seconds
                before = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - before)
    return {name: Times(tuple(sorted(values))) for name, values in seconds.items()}


def show(times: Mapping[str, Times]) -> None:
    """Print one line a function."""
    for name, value in times.items():
        print(f"{name:32s} {value}", flush=True)


class Machine:
    """The limits of the machine, to be measured among the functions that are held against them.

    Put `gemm` and `copy` into `interleaved`, and give their times to `flops_per_s` and `bytes_per_s`.
    """

    def __init__(self) -> None:
        self._a, self._b = torch.randn(_GEMM_SIZE, _GEMM_SIZE), torch.randn(_GEMM_SIZE, _GEMM_SIZE)
        self._product = torch.empty(_GEMM_SIZE, _GEMM_SIZE)
        self._source, self._target = torch.randn(_COPY_ELEMENTS), torch.empty(_COPY_ELEMENTS)

    def gemm(self) -> object:
        """A float32 product of two square matrices."""
        return torch.mm(self._a, self._b, out=self._product)

    def copy(self) -> object:
        """A copy that no cache holds."""
        return self._target.copy_(self._source)

    @staticmethod
    def flops_per_s(gemm: Times) -> float:
        """Of the product, at its median."""
        return 2 * _GEMM_SIZE**3 / gemm.median

    @staticmethod
    def bytes_per_s(copy: Times) -> float:
        """Read and written, at its median."""
        return 2 * 4 * _COPY_ELEMENTS / copy.median
