"""The paper: its printed tables, its habits, and their reproduction. Only the command line knows of it."""

from safa.paper.printed import TableCell, printed

__all__ = ["TableCell", "printed"]
