"""The fleet of a run, from its settings."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.fleet.availability import daily_times
from safa.fleet.draws import draw_sizes, draw_speeds
from safa.fleet.faults import Faults
from safa.fleet.fedscale import device_links, device_speeds, is_pickle, times_online
from safa.fleet.files import read_column, read_links, read_trace
from safa.fleet.fleet import Fleet
from safa.fleet.named import phone_mbps, speeds_of
from safa.runs.settings import Settings

__all__ = ["check_sizes", "client_speeds", "make_fleet"]

_SMALLEST_SHARD = 20


def make_fleet(settings: Settings, sizes: ArrayLike | None = None) -> Fleet:
    """The fleet of a run. It depends on the seed and the world's settings, never on the protocol.

    `sizes` says how many samples every client holds, where the partition of the run decides that.
    """
    count, seed = settings.clients, settings.seed
    speeds = client_speeds(settings)
    down, up = _links(settings)
    trace, period_s = _trace(settings)
    return Fleet.assemble(
        speeds=speeds,
        sizes=_sizes(settings) if sizes is None else np.asarray(sizes, dtype=np.float64),
        epochs=settings.epochs,
        local_steps=settings.local_steps,
        batch_size=settings.batch_size,
        down_mbps=down,
        up_mbps=up,
        server_mbps=settings.server_mbps,
        model_size_mb=settings.model_size_mb,
        faults=Faults(
            count,
            seed=seed,
            crash_rate=settings.crash_rate,
            model=settings.fault_model,
            trace=trace,
            period_s=period_s,
            return_delay_s=settings.return_delay_s,
        ),
    )


def _sizes(settings: Settings) -> NDArray[np.int64] | NDArray[np.float64]:
    """How many samples every client holds: from a file, or drawn."""
    if settings.decides_sizes:
        raise SafaError(f"with partition = {settings.partition} a fleet can only be made for data that are at hand")
    if settings.sizes is not None:
        return read_column(settings.sizes, count=settings.clients, what="sizes")
    # The paper's floor is max(20, B); half the mean keeps it in reach where B is as large as a shard.
    floor = min(max(_SMALLEST_SHARD, settings.batch_size), settings.mean_size / 2)
    return draw_sizes(
        settings.clients,
        seed=settings.seed,
        distribution=settings.size_distribution,
        mean=settings.mean_size,
        spread=settings.size_spread,
        floor=floor,
    )


def client_speeds(settings: Settings) -> NDArray[np.float64]:
    """The clients' speeds: from a file, of a fleet by name, or drawn as the settings say."""
    count, seed = settings.clients, settings.seed
    if is_pickle(settings.speeds):
        return device_speeds(settings.speeds, count=count, seed=seed, batch_size=settings.batch_size)
    if settings.speeds is not None:
        return read_column(settings.speeds, count=count, what="speeds")
    if settings.fleet != "paper":
        return speeds_of(settings.fleet, count, seed=seed, mean=settings.speed_mean)
    return draw_speeds(
        count,
        seed=seed,
        distribution=settings.speed_distribution,
        mean=settings.speed_mean,
        spread=settings.speed_spread,
        floor=settings.speed_floor,
    )


def _links(settings: Settings) -> tuple[ArrayLike, ArrayLike]:
    """The clients' download and upload bandwidths in Mbit/s."""
    if is_pickle(settings.links):
        either_way = device_links(settings.links, count=settings.clients, seed=settings.seed)
        return either_way, either_way
    if settings.links is not None:
        return read_links(settings.links, count=settings.clients)
    if settings.fleet == "phones":
        either_way = phone_mbps(settings.clients, seed=settings.seed)
        return either_way, either_way
    return settings.down_mbps, settings.up_mbps


def _trace(settings: Settings) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """When clients are online, and after how long that repeats, where it does."""
    if settings.online_hours:
        return daily_times(settings.clients, seed=settings.seed, hours=settings.online_hours)
    if settings.trace is None:
        return None, None
    if is_pickle(settings.trace):
        return times_online(settings.trace, count=settings.clients, seed=settings.seed)
    return read_trace(settings.trace, count=settings.clients), None


def check_sizes(settings: Settings, fleet: Fleet, samples: int) -> None:
    """Refuse sizes from a file of a run that trains, if they count more samples than there are.

    Sizes count training and test samples together, as `samples` must. Sizes that are drawn are not held to it: their
    mean is a property of the simulated devices, which stays when the fleet grows.
    """
    total = float(fleet.sizes.sum())
    if settings.train and settings.sizes is not None and total > samples * (1 + 1e-9):
        where = f" in {settings.sizes}" if isinstance(settings.sizes, str) else ""
        raise SafaError(
            f"the sizes{where} add up to {total:,.0f} samples, but {settings.task} has {samples:,}; "
            "train on fewer, or only simulate the rounds"
        )
