"""Writes the table of arguments into docs/launcher.md from the table the launcher reads, so that it cannot drift.

python scripts/launcher_page.py            print the table
python scripts/launcher_page.py --write    put it between its marks in docs/launcher.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from neuronserve.server.launcher.arguments import Argument
from neuronserve.server.launcher.reading import TABLE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "launcher.md"
BEGIN, END = "<!-- arguments: python scripts/launcher_page.py --write -->\n", "<!-- end of arguments -->\n"


def table() -> str:
    lines = ["| argument | variables | default | here | |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*lines, *map(_row, TABLE)]) + "\n"


def _row(argument: Argument) -> str:
    flags = [argument.flag, *([argument.short] if argument.short else [])] if argument.has_flag else []
    flag, variables = (", ".join(f"`{name}`" for name in names) for names in (flags, argument.variables))
    is_shown = argument.default is not None and not argument.is_switch
    default = f"`{argument.default}`" if is_shown else ""
    return f"| {flag} | {variables} | {default} | {argument.fate} | {argument.help or argument.why} |"


def written(page: str) -> str:
    """`page` with today's table between the marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def main() -> None:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
