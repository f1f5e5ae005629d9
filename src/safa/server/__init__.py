"""The server: a protocol, an aggregator, a source of updates, metrics and a run folder, told events and time."""
