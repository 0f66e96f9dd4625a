"""Writes docs/hugectr-compat.md from the tables: ``python -m terarec.hugectr.compat_page > docs/hugectr-compat.md``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from terarec.hugectr import enums
from terarec.hugectr.graph_json import CLAUSES
from terarec.hugectr.tables import names
from terarec.hugectr.tables.contents import TABLES
from terarec.hugectr.tables.table import NEWEST, OLDEST, REQUIRED, Parameter, Status, Table

_HEAD = """# HugeCTR compatibility

Scripts for HugeCTR, releases 2.3 to 25.03, run with one line changed, `import terarec.hugectr as hugectr`, or with
none: `python -m terarec.hugectr SCRIPT.py`. This page lists every name and parameter. It is made from the tables that
the code itself walks (`python -m terarec.hugectr.compat_page`).

* **supported**: it has the meaning that it has there.
* **ignored**: it is checked and can be read back, and changes nothing: it only steers a GPU, or says what is so anyway.
* **refused**: any value but the default raises an error with the reason, because it would change results.

A value of another kind, an unknown name and a missing value raise `WrongInputError`, in one line. Releases are named
where a parameter is not in all that have the call; parameters of all releases may be mixed. Given by place they come in
the order of this page."""


def page() -> str:
    """The page."""
    parts = [
        _HEAD,
        "## Commands",
        _names(names.COMMANDS),
        "## Objects",
        _contents(),
        *(_tables(name) for name in _table_names()),
        "## Model",
        _names(names.MODEL),
        "## Session: the low-level interface",
        _names(names.LOW_LEVEL),
        "## Other names",
        _names(names.OTHERS),
        "## Enumerations",
        "Members are names of the package, too (`hugectr.Adam`), unless two enumerations share the name.",
        _rows(
            ("enumeration", "members"), ([f"`{enum.__name__}`", ", ".join(enum.__members__)] for enum in enums.ENUMS)
        ),
        "## Layers in JSON",
        "`Model.graph_to_json` writes, and `Model.construct_from_json` and training files read, beside `type`, "
        "`bottom` and `top`; a tensor that several layers read goes through a Slice with a copy for each; `is_copy` "
        "marks so that it is left out again:",
        _rows(("layer", "keys"), ([f"`{layer.name}`", _keys(clauses)] for layer, clauses in CLAUSES.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _table_names() -> tuple[str, ...]:
    """The calls, each once: one that releases declare in several ways has as many tables."""
    return tuple(dict.fromkeys(table.name for table in TABLES))


def _contents() -> str:
    links = (f"[{name}](#{name.lower().replace('.', '')})" for name in _table_names())
    return "\n".join(textwrap.wrap(", ".join(links) + ".", 120, break_long_words=False, break_on_hyphens=False))


def _tables(name: str) -> str:
    """All forms of a call in one place."""
    forms = [table for table in TABLES if table.name == name]
    parts = [f"### {name}"]
    if len(forms) > 1:
        parts.append(f"{len(forms)} forms, by release or by what is given.")
    parts += [_table(table) for table in forms]
    return "\n\n".join(parts)


def _table(table: Table) -> str:
    rows = ([_title(row), _default(row.default), _releases(row), _status(row), row.meaning] for row in table.rows)
    return f"{_sentence(table.meaning)}\n\n" + _rows(("parameter", "default", "releases", "status", "meaning"), rows)


def _names(rows: Iterable[names.Name]) -> str:
    return _rows(
        ("name", "releases", "status", "meaning"),
        ([f"`{row.name}`", _releases(row), _status(row), row.meaning] for row in rows),
    )


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _title(row: Parameter) -> str:
    return ", ".join(f"`{name}`" for name in (row.name, *row.aliases))


def _default(value: Any) -> str:
    if value is REQUIRED:
        return ""
    if isinstance(value, Enum):
        return f"`{value.name}`"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{key.name}: {item}" for key, item in value.items()) + "}`"
    return f"`{value!r}`" if isinstance(value, bool | int | float | str | list | None) else f"`{type(value).__name__}`"


def _releases(row: Parameter | names.Name) -> str:
    if (row.since, row.until) == (OLDEST, NEWEST):
        return ""
    if row.until == NEWEST:
        return f"{row.since} on"
    return row.since if row.since == row.until else f"{row.since} to {row.until}"


def _status(row: Parameter | names.Name) -> str:
    if row.status is Status.SUPPORTED:
        return "supported"
    return f"{row.status.value}: {row.why}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _keys(clauses: Iterable[Any]) -> str:
    return ", ".join(f"`{'.'.join(clause.path)}`" for clause in clauses)


if __name__ == "__main__":
    print(page(), end="")
