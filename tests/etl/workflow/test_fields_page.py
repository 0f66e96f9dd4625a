# SPDX-License-Identifier: Apache-2.0
"""docs/workflow-fields.md is generated; ``python -m tests.etl.workflow.test_fields_page > docs/workflow-fields.md``."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import terarec.etl.ops  # registers the operators
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, WorkflowSpec
from terarec.spec.codec import documentation_of, hints_of, kinds_of, members, present, summary_of, to_data
from terarec.spec.registry import OperatorSpec

PAGE = Path(__file__).parents[3] / "docs" / "workflow-fields.md"
INTRODUCTION = """# Fields of workflows

The fields of `workflow.json` and of the classes of Python, which have the same names; [workflows.md](workflows.md) says
what steps compute, from which columns, and how they are fitted. A field with a default may be left out; an unknown
field is an error, and so is a value of another type. This page is generated from the classes.
"""
SCALARS = {str: "text", int: "integer", float: "number", bool: "true or false"}
PARTS: Mapping[Any, str] = {
    WorkflowSpec: "workflow",
    SourceSpec: "[source](#source)",
    SourceColumn: "[columns](#column-of-a-source)",
    LabelSpec: "[labels](#label)",
    OperatorSpec: "[steps](#steps)",
}


def operators() -> dict[str, type[OperatorSpec]]:
    """Return the operators of the project, and none that tests have registered."""
    found = {kind: spec for kind, spec in OperatorSpec.members().items() if spec.__module__.startswith("terarec.")}
    return dict(sorted(found.items()))


def page() -> str:
    lines = [INTRODUCTION]
    parts = {"Workflow": WorkflowSpec, "Source": SourceSpec, "Column of a source": SourceColumn, "Label": LabelSpec}
    for title, part in parts.items():
        lines += [f"## {title}", "", *table(part), ""]
    lines += ["## Splits", "", "`split` is an object with a `kind`; `null` has all rows for training.", ""]
    for kind, split in kinds_of(hints_of(WorkflowSpec)["split"]).items():
        lines += [f"### {kind}", "", f"`{split.__name__}`: {summary_of(split)}", "", *table(split), ""]
    lines += ["## Steps", "", "Each of `steps` is an object with a `kind`.", ""]
    for kind, step in operators().items():
        title = f"[`{step.__name__}`](workflows.md#{anchor(step)}): {summary_of(step)}"
        lines += [f"### {kind}", "", title, "", *table(step), ""]
    return "\n".join(lines)


def anchor(spec: type) -> str:
    """Return the section of docs/workflows.md."""
    sections = [line.removeprefix("### ") for line in PAGE.with_name("workflows.md").read_text().splitlines()]
    return spec.__name__.lower() if spec.__name__ in sections else "operators"


def table(spec: type) -> Iterator[str]:
    yield from ("| field | type | default | meaning |", "|---|---|---|---|")
    meanings, hints = documentation_of(spec), hints_of(spec)
    for field in dataclasses.fields(typing.cast(Any, spec)):
        cells = (f"`{field.name}`", type_of(hints[field.name]), default_of(field), as_json(meanings[field.name]))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def type_of(hint: Any) -> str:
    """Return the words for the type of a field in JSON."""
    if hint in PARTS:
        return PARTS[hint]
    if kinds_of(hint):
        return "[split](#splits) or null"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("null" if member is type(None) else type_of(member) for member in members(hint))
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{json.dumps(word)}`" for word in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return f"list of {'some of ' if typing.get_origin(item) is Literal else ''}{type_of(item)}"
    if typing.get_origin(hint) is not None:
        return f"object of {type_of(typing.get_args(hint)[1])}"
    return SCALARS[present(hint)]


def as_json(meaning: str) -> str:
    return re.sub(r"\bNone\b", "null", meaning).replace("``", "`")


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(to_data(field.default_factory()))}`"
    return "required" if field.default is dataclasses.MISSING else f"`{json.dumps(to_data(field.default))}`"


def test_the_page_is_the_classes() -> None:
    """Finding P6: fields of steps were on no page. A field without an entry in the docstring of its class fails."""
    assert PAGE.read_text() == page() + "\n"


def test_every_operator_of_the_package_is_on_it() -> None:
    classes = [found for found in vars(terarec.etl.ops).values() if inspect.isclass(found)]
    assert {found.kind for found in classes if issubclass(found, OperatorSpec) and found.kind} == set(operators())


if __name__ == "__main__":
    print(page())
