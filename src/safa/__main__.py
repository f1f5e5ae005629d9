"""`python -m safa`."""

from safa.cli.program import entry

entry()
