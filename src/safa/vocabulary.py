"""Names that the settings offer and a heavier room implements, so that reading settings loads no tensor library."""

__all__ = ["OPTIMISERS", "TRAINERS"]

TRAINERS = ("batched", "serial")
OPTIMISERS = ("sgd", "adam")
