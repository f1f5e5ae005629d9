"""Write the results of an arena into docs/arena.md.

python docs/arena_table.py DIR                 the arena
python docs/arena_table.py DIR linear          another plan: linear, ablation, ablation-cnn
python docs/arena_table.py DIR confirmation    the confirmation, without the tables of single worlds
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("arena.md")


def with_results(page: str, results: str, what: str = "arena") -> str:
    """The page with these results in place of those that it has."""
    begin, end = f"<!-- {what} -->\n", f"<!-- end of {what} -->\n"
    before, _, rest = page.partition(begin)
    return before + begin + results + end + rest.partition(end)[2]


def without_worlds(results: str) -> str:
    """The results without the tables of single worlds."""
    parts = re.split(r"^(?=### )", results, flags=re.MULTILINE)
    return "".join(part for part in parts if not re.match("### World (?!by world\n)", part))


if __name__ == "__main__":
    folder, what = sys.argv[1], (sys.argv[2:] or ["arena"])[0]
    found = (Path(folder) / "arena.md").read_text(encoding="utf-8")
    shown = without_worlds(found) if what == "confirmation" else found
    PAGE.write_text(with_results(PAGE.read_text(encoding="utf-8"), shown, what), encoding="utf-8")
