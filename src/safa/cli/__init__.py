"""The command line, one module per command."""

from safa.cli.program import entry, main

__all__ = ["entry", "main"]
