"""A fleet drives a protocol under a clock; out comes one record a round. No model is trained here."""

from safa.simulation.causal import causal_rounds
from safa.simulation.paper import paper_rounds
from safa.simulation.run import drive, run_rounds

__all__ = ["causal_rounds", "drive", "paper_rounds", "run_rounds"]
