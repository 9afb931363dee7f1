"""Searches the pools that serve a load best: the highest goodput for each device, under latency targets."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.bar import Bar
from rich.table import Table

from kvferry.config import DeploymentConfig
from simulator.costs import Costs
from simulator.report import summary
from simulator.simulation import Simulation
from simulator.traces import TraceRequest, at_rate

# A rate is found to this share of itself.
PRECISION = 0.02
# Doublings from the first guess, up or down, before the search gives up.
_MAX_DOUBLINGS = 24
_BAR_WIDTH = 20


@dataclass(frozen=True, slots=True)
class Targets:
    """A request meets them with its first token in `ttft_s` and `tpot_s` for each after it; `share` must."""

    ttft_s: float
    tpot_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Setting:
    """A deployment to try. tp: devices of a worker."""

    num_prefill: int
    num_decode: int
    prefill_tp: int = 1
    decode_tp: int = 1
    max_step_tokens: int | None = None
    max_batch_size: int | None = None

    @property
    def num_devices(self) -> int:
        """Of both pools."""
        return self.num_prefill * self.prefill_tp + self.num_decode * self.decode_tp

    def apply(self, config: DeploymentConfig) -> DeploymentConfig:
        """The deployment with this in it."""
        prefill: dict[str, Any] = {"count": self.num_prefill}
        decode: dict[str, Any] = {"count": self.num_decode}
        if self.max_step_tokens is not None:
            prefill["max_step_tokens"] = self.max_step_tokens
        if self.max_batch_size is not None:
            decode["max_batch_size"] = self.max_batch_size
        return config.model_copy(
            update={
                "prefill": config.prefill.model_copy(update=prefill),
                "decode": config.decode.model_copy(update=decode),
            }
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """A setting and the highest rate at which it meets the targets; 0 where none was found."""

    setting: Setting
    rate: float

    @property
    def rate_per_device(self) -> float:
        """What the settings are compared by."""
        return self.rate / self.setting.num_devices


def settings(
    max_devices: int,
    tps: Sequence[int] = (1,),
    chunks: Sequence[int | None] = (None,),
    batches: Sequence[int | None] = (None,),
) -> Iterator[Setting]:
    """All that take so many devices at most, each tensor-parallel degree of either pool with each."""
    for prefill_tp in tps:
        for decode_tp in tps:
            for num_prefill in range(1, (max_devices - decode_tp) // prefill_tp + 1):
                num_left = max_devices - num_prefill * prefill_tp
                for num_decode in range(1, num_left // decode_tp + 1):
                    for chunk in chunks:
                        for batch in batches:
                            yield Setting(num_prefill, num_decode, prefill_tp, decode_tp, chunk, batch)


def highest_rate(is_met: Callable[[float], bool], first_guess: float = 1.0) -> float:
    """The highest rate at which it is, by doubling and bisection; 0 where even a tiny one is too high."""
    low = high = first_guess
    is_low_met = is_met(low)
    for _ in range(_MAX_DOUBLINGS):
        if is_low_met:
            high = 2 * low
            if not is_met(high):
                break
            low = high
        else:
            low, high = low / 2, low
            if is_met(low):
                break
    else:
        return low if is_low_met else 0.0
    while high - low > PRECISION * low:
        middle = (low + high) / 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def attains(
    config: DeploymentConfig, costs: Costs, trace: Sequence[TraceRequest], targets: Targets
) -> Callable[[float], bool]:
    """Whether the trace at a rate meets the targets on this deployment."""

    def is_met(rate: float) -> bool:
        result = Simulation(config, costs).run(at_rate(trace, rate))
        return bool(summary(result, targets.ttft_s, targets.tpot_s)["attainment"] >= targets.share)

    return is_met


def plan(
    config: DeploymentConfig,
    costs_at: Callable[[int, int], Costs],
    trace: Sequence[TraceRequest],
    targets: Targets,
    candidates: Sequence[Setting],
    progress: Callable[[str, float | None], None],
) -> list[Planned]:
    """Every candidate with its rate, the best for a device first. costs_at: by prefill TP and decode TP."""
    planned: list[Planned] = []
    for index, setting in enumerate(candidates):
        progress("planning", index / len(candidates))
        costs = costs_at(setting.prefill_tp, setting.decode_tp)
        is_met = attains(setting.apply(config), costs, trace, targets)
        planned.append(Planned(setting, highest_rate(is_met)))
    return sorted(planned, key=lambda each: (-each.rate_per_device, each.setting.num_devices))


def frontier(planned: Sequence[Planned]) -> list[Planned]:
    """The setting with the highest rate for each number of devices, fewest first."""
    best: dict[int, Planned] = {}
    for each in planned:
        former = best.setdefault(each.setting.num_devices, each)
        if each.rate > former.rate:
            best[each.setting.num_devices] = each
    return [best[num_devices] for num_devices in sorted(best)]


def table(points: Sequence[Planned]) -> Table:
    """The frontier, in requests a second; the bars are the rates for each device. "-": as configured."""
    shown = Table("devices", "prefill", "decode", "chunk", "batch", "rate", "a device", "")
    top = max((each.rate_per_device for each in points), default=0.0)
    for each in points:
        setting = each.setting
        shown.add_row(
            str(setting.num_devices),
            f"{setting.num_prefill} x TP{setting.prefill_tp}",
            f"{setting.num_decode} x TP{setting.decode_tp}",
            str(setting.max_step_tokens or "-"),
            str(setting.max_batch_size or "-"),
            f"{each.rate:.3f}",
            f"{each.rate_per_device:.3f}",
            Bar(top or 1.0, 0.0, each.rate_per_device, width=_BAR_WIDTH),
        )
    return shown
