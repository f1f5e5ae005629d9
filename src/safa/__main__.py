"""`python -m safa`."""

from safa.cli import entry

entry()
