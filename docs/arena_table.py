"""Write the results of an arena into docs/arena.md.

python docs/arena_table.py DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).with_name("arena.md")
BEGIN, END = "<!-- arena -->\n", "<!-- end of arena -->\n"


def with_results(page: str, results: str) -> str:
    """The page with these results in place of those that it has."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + results + END + rest.partition(END)[2]


if __name__ == "__main__":
    found = (Path(sys.argv[1]) / "arena.md").read_text(encoding="utf-8")
    PAGE.write_text(with_results(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
