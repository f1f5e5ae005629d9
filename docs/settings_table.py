"""Write the table of all settings into docs/python.md.

python docs/settings_table.py
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from safa import Settings

PAGE = Path(__file__).with_name("python.md")
BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->\n"
MORE = {
    "train": "whether a model is trained, or the rounds are simulated only",
    "protocol_options": "own settings of a protocol of another package, by name",
    "aggregator_options": "own settings of an aggregator of another package, by name",
}
"""Settings that are no options of the command line."""


def table() -> str:
    """A line for every setting: its name, what it may be, its default, and what it means."""
    lines = ["| setting | values | default | |", "|---|---|---|---|"]
    for item in fields(Settings):
        if item.metadata or item.name in MORE:
            meaning = item.metadata["help"] if item.metadata else MORE[item.name]
            lines.append(f"| `{item.name}` | {values(item)} | {default(item)} | {meaning} |")
    return "\n".join(lines) + "\n"


def values(item: Field[Any]) -> str:
    """What a setting may be."""
    if item.metadata.get("choices"):
        return ", ".join(item.metadata["choices"])
    if item.metadata.get("is_file"):
        return "a file, or the numbers themselves"
    kind = str(item.type).partition(" ")[0].partition("[")[0]
    name = {"int": "a whole number", "float": "a number", "bool": "true, false", "str": "text", "Mapping": "a table"}
    return " or ".join([name[kind], *item.metadata.get("words", ())])


def default(item: Field[Any]) -> str:
    """The default of a setting."""
    if item.default is MISSING:
        return "" if item.name in MORE else "the task's"
    return "" if item.default in (None, "") else str(item.default).lower()


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
