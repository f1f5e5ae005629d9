"""SAFA, a semi-asynchronous protocol for federated learning: simulate it, measure it, deploy it."""

__version__ = "0.1.0"
