"""The fleet of a run, from its settings."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.fleet.draws import draw_sizes, draw_speeds
from safa.fleet.faults import Faults
from safa.fleet.files import read_column, read_links, read_trace
from safa.fleet.fleet import Fleet
from safa.runs.settings import Settings

__all__ = ["check_sizes", "make_fleet"]

_SMALLEST_SHARD = 20


def make_fleet(settings: Settings, sizes: ArrayLike | None = None) -> Fleet:
    """The fleet of a run. It depends on the seed and the world's settings, never on the protocol.

    `sizes` says how many samples every client holds, where the partition of the run decides that.
    """
    count, seed = settings.clients, settings.seed
    if settings.speeds:
        speeds = read_column(settings.speeds, count=count, what="speeds")
    else:
        speeds = draw_speeds(
            count,
            seed=seed,
            distribution=settings.speed_distribution,
            mean=settings.speed_mean,
            spread=settings.speed_spread,
            floor=settings.speed_floor,
        )
    down, up = read_links(settings.links, count=count) if settings.links else (settings.down_mbps, settings.up_mbps)
    return Fleet.assemble(
        speeds=speeds,
        sizes=_sizes(settings) if sizes is None else np.asarray(sizes, dtype=np.float64),
        epochs=settings.epochs,
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
            trace=read_trace(settings.trace, count=count) if settings.trace else None,
        ),
    )


def _sizes(settings: Settings) -> NDArray[np.int64] | NDArray[np.float64]:
    """How many samples every client holds: from a file, or drawn."""
    if settings.decides_sizes:
        raise SafaError(f"with partition = {settings.partition} a fleet can only be made for data that are at hand")
    if settings.sizes:
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


def check_sizes(settings: Settings, fleet: Fleet, samples: int) -> None:
    """Refuse sizes from a file of a run that trains, if they count more samples than there are.

    Sizes count training and test samples together, as `samples` must. Sizes that are drawn are not held to it: their
    mean is a property of the simulated devices, which stays when the fleet grows.
    """
    total = float(fleet.sizes.sum())
    if settings.train and settings.sizes and total > samples * (1 + 1e-9):
        raise SafaError(
            f"the sizes in {settings.sizes} add up to {total:,.0f} samples, but {settings.task} has {samples:,}; "
            "train on fewer, or only simulate the rounds"
        )
