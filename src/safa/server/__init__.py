"""The server: a protocol, an aggregator, a source of updates, metrics and a run folder, driven by events and time."""

from safa.server.server import Server

__all__ = ["Server"]
