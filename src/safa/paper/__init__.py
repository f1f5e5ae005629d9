"""The paper: its printed tables, its habits, and their reproduction. No other room knows of it but the command line."""

from safa.paper.printed import TableCell, printed

__all__ = ["TableCell", "printed"]
