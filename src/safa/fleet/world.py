"""The fleet of a run, from its settings."""

from __future__ import annotations

import numpy as np

from safa.errors import SafaError
from safa.fleet.draws import draw_sizes, draw_speeds
from safa.fleet.faults import Faults
from safa.fleet.files import read_column, read_links, read_trace
from safa.fleet.fleet import Fleet
from safa.runs.settings import Settings

__all__ = ["check_sizes", "make_fleet"]

_SMALLEST_SHARD = 20


def make_fleet(settings: Settings) -> Fleet:
    """The fleet of a run. It depends on the seed and the world's settings, never on the protocol."""
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
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]] | np.ndarray[tuple[int], np.dtype[np.float64]]
    if settings.sizes:
        sizes = read_column(settings.sizes, count=count, what="sizes")
    else:
        # The paper's floor is max(20, B); half the mean keeps it in reach where B is as large as a shard.
        floor = min(max(_SMALLEST_SHARD, settings.batch_size), settings.mean_size / 2)
        sizes = draw_sizes(
            count,
            seed=seed,
            distribution=settings.size_distribution,
            mean=settings.mean_size,
            spread=settings.size_spread,
            floor=floor,
        )
    down, up = read_links(settings.links, count=count) if settings.links else (settings.down_mbps, settings.up_mbps)
    return Fleet.assemble(
        speeds=speeds,
        sizes=sizes,
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
            trace=read_trace(settings.trace, count=count) if settings.trace else None,
        ),
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
