"""A protocol meets a fleet under a clock; out comes one record a round. No model is trained here."""

from safa.simulation.causal import causal_rounds
from safa.simulation.paper import paper_rounds
from safa.simulation.run import check_sizes, make_fleet, run_rounds

__all__ = ["causal_rounds", "check_sizes", "make_fleet", "paper_rounds", "run_rounds"]
