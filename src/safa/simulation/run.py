"""From settings to rounds: build the world and the server, and let the one drive the other."""

from __future__ import annotations

from collections.abc import Iterator

from safa.fleet import Fleet, make_fleet
from safa.protocol import build
from safa.protocol.records import RoundRecord
from safa.runs.settings import Settings
from safa.server.server import Server
from safa.simulation.causal import causal_rounds
from safa.simulation.paper import paper_rounds

__all__ = ["drive", "run_rounds"]


def run_rounds(settings: Settings, fleet: Fleet | None = None) -> Iterator[RoundRecord]:
    """Simulate a run, a record a round; everything that can be wrong with the settings is found before the first.

    Without a fleet, one is made of the settings alone.
    """
    world = make_fleet(settings) if fleet is None else fleet
    protocol = build(settings.protocol, world.sizes, settings.values(), settings.protocol_options)
    return drive(Server(protocol, seed=settings.seed, rounds=settings.rounds), world, settings)


def drive(server: Server, fleet: Fleet, settings: Settings) -> Iterator[RoundRecord]:
    """A fleet drives a server through all its rounds, a record a round, under the clock of the settings."""
    if settings.clock == "paper":
        return paper_rounds(server, fleet, estimate_error=settings.estimate_error)
    return causal_rounds(
        server,
        fleet,
        detection_delay_s=settings.detection_delay_s,
        keep_progress=settings.keep_progress,
        estimate_error=settings.estimate_error,
        time_limit_s=settings.time_limit_s,
    )
