"""Write the results of an arena into docs/arena.md.

python docs/arena_table.py DIR             the arena
python docs/arena_table.py DIR ablation    the ablation
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).with_name("arena.md")


def with_results(page: str, results: str, what: str = "arena") -> str:
    """The page with these results in place of those that it has."""
    begin, end = f"<!-- {what} -->\n", f"<!-- end of {what} -->\n"
    before, _, rest = page.partition(begin)
    return before + begin + results + end + rest.partition(end)[2]


if __name__ == "__main__":
    found = (Path(sys.argv[1]) / "arena.md").read_text(encoding="utf-8")
    PAGE.write_text(with_results(PAGE.read_text(encoding="utf-8"), found, *sys.argv[2:3]), encoding="utf-8")
