"""The settings that a call may give, with their types: an editor completes them, and a type checker finds a wrong one.

They are those of `safa.runs.settings.Settings`, which has the default, the meaning and the limits of each; the table in
`docs/python.md` shows them. A test holds both lists against each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

__all__ = ["HasArray", "SettingsOptions", "SweepOptions", "Table"]


class HasArray(Protocol):
    """What numpy can make an array of: an array, a tensor, a data frame, a column of one."""

    def __array__(self) -> Any:
        """The array."""


Clock = Literal["causal", "paper"]
Averaging = Literal["participants", "population"]
FaultModel = Literal["attempt", "round"]
FleetName = Literal["paper", "phones", "two-speed", "lognormal"]
SizeDistribution = Literal["normal", "exponential", "equal"]
SpeedDistribution = Literal["exponential", "normal", "lognormal", "constant"]
Staleness = Literal["constant", "polynomial", "hinge"]
TrainerName = Literal["auto", "batched", "threads", "processes", "serial", "ray"]
OptimiserName = Literal["sgd", "adam", "adamw"]
LearningRate = float | Literal["auto"]
WorkCap = float | Literal["auto"]
Schedule = str | Callable[[int], float]
Options = Mapping[str, Any]
Table = str | os.PathLike[str] | Sequence[float] | Sequence[Sequence[float]] | HasArray
"""Numbers about the clients: the name of a file, or the numbers themselves."""

_T = TypeVar("_T")
Several: TypeAlias = _T | Sequence[_T]
"""A value, or a list of values, each of which is for runs of its own."""


class SettingsOptions(TypedDict, total=False):
    """The settings of a run that a call may give. `docs/python.md` says what each of them means."""

    protocol: str
    clock: Clock
    seed: int
    until: str
    time_limit_s: float
    fraction: float
    lag_tolerance: int
    rounds: int
    clients: int
    epochs: int
    local_steps: int
    batch_size: int
    lr: LearningRate
    schedule: Schedule
    round_limit_s: float
    averaging: Averaging
    work_cap: WorkCap
    normalise_work: bool
    crash_rate: float
    fault_model: FaultModel
    keep_progress: bool
    detection_delay_s: float
    return_delay_s: float
    fleet: FleetName
    mean_size: float
    size_distribution: SizeDistribution
    size_spread: float
    speed_distribution: SpeedDistribution
    speed_mean: float
    speed_spread: float
    speed_floor: float
    down_mbps: float
    up_mbps: float
    server_mbps: float
    model_size_mb: float
    speeds: Table | None
    sizes: Table | None
    links: Table | None
    trace: Table | None
    online_hours: float
    estimate_error: float
    mixing: float
    staleness: Staleness
    staleness_exponent: float
    hinge_slope: float
    hinge_lag: float
    buffer_size: int
    server_lr: float
    interval_share: float
    step_ratio: float
    late_factor: float
    aggregator: str
    trim: float
    hostile: float
    server_step: float
    server_optimiser: str
    server_optimiser_lr: float
    server_momentum: float
    server_beta2: float
    server_epsilon: float
    partition: str
    shuffle: bool
    trainer: TrainerName
    device: str
    compile: bool
    tf32: bool
    threads: int
    optimiser: OptimiserName
    momentum: float
    nesterov: bool
    clip: float
    weight_decay: float
    proximal: float
    eval_every: int
    eval_clients: bool
    memory_mb: float
    checkpoint_every: int
    train: bool
    aggregator_options: Options
    protocol_options: Options


class SweepOptions(TypedDict, total=False):
    """The settings that a sweep may give: a value, or a list of values.

    A list of numbers about the clients is one value.
    """

    protocol: Several[str]
    clock: Several[Clock]
    seed: Several[int]
    until: Several[str]
    time_limit_s: Several[float]
    fraction: Several[float]
    lag_tolerance: Several[int]
    rounds: Several[int]
    clients: Several[int]
    epochs: Several[int]
    local_steps: Several[int]
    batch_size: Several[int]
    lr: Several[LearningRate]
    schedule: Several[Schedule]
    round_limit_s: Several[float]
    averaging: Several[Averaging]
    work_cap: Several[WorkCap]
    normalise_work: Several[bool]
    crash_rate: Several[float]
    fault_model: Several[FaultModel]
    keep_progress: Several[bool]
    detection_delay_s: Several[float]
    return_delay_s: Several[float]
    fleet: Several[FleetName]
    mean_size: Several[float]
    size_distribution: Several[SizeDistribution]
    size_spread: Several[float]
    speed_distribution: Several[SpeedDistribution]
    speed_mean: Several[float]
    speed_spread: Several[float]
    speed_floor: Several[float]
    down_mbps: Several[float]
    up_mbps: Several[float]
    server_mbps: Several[float]
    model_size_mb: Several[float]
    speeds: Table | Sequence[str | os.PathLike[str]] | None
    sizes: Table | Sequence[str | os.PathLike[str]] | None
    links: Table | Sequence[str | os.PathLike[str]] | None
    trace: Table | Sequence[str | os.PathLike[str]] | None
    online_hours: Several[float]
    estimate_error: Several[float]
    mixing: Several[float]
    staleness: Several[Staleness]
    staleness_exponent: Several[float]
    hinge_slope: Several[float]
    hinge_lag: Several[float]
    buffer_size: Several[int]
    server_lr: Several[float]
    interval_share: Several[float]
    step_ratio: Several[float]
    late_factor: Several[float]
    aggregator: Several[str]
    trim: Several[float]
    hostile: Several[float]
    server_step: Several[float]
    server_optimiser: Several[str]
    server_optimiser_lr: Several[float]
    server_momentum: Several[float]
    server_beta2: Several[float]
    server_epsilon: Several[float]
    partition: Several[str]
    shuffle: Several[bool]
    trainer: Several[TrainerName]
    device: Several[str]
    compile: Several[bool]
    tf32: Several[bool]
    threads: Several[int]
    optimiser: Several[OptimiserName]
    momentum: Several[float]
    nesterov: Several[bool]
    clip: Several[float]
    weight_decay: Several[float]
    proximal: Several[float]
    eval_every: Several[int]
    eval_clients: Several[bool]
    memory_mb: Several[float]
    checkpoint_every: Several[int]
    train: Several[bool]
    aggregator_options: Several[Options]
    protocol_options: Several[Options]
