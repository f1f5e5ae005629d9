"""Names that the settings offer and another package implements, so that reading settings loads none of those."""

__all__ = ["FAULT_MODELS", "FLEETS", "OPTIMISERS", "SIZE_DISTRIBUTIONS", "SPEED_DISTRIBUTIONS", "TRAINERS"]

TRAINERS = ("auto", "batched", "threads", "processes", "serial", "ray")
OPTIMISERS = ("sgd", "adam", "adamw")
SPEED_DISTRIBUTIONS = ("exponential", "normal", "lognormal", "constant")
SIZE_DISTRIBUTIONS = ("normal", "exponential", "equal")
FAULT_MODELS = ("attempt", "round")
FLEETS = ("paper", "phones", "two-speed", "lognormal")
