"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

AllowImport = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-import", metavar="PACKAGE", help="A package whose code the workflow or the model may name; repeatable."
    ),
]
"""What is not allowed by it is refused when a workflow is read, or a model is built."""

Force = Annotated[bool, typer.Option("--force", help="Replace what is at --out.")]
"""Without it nothing that is there is replaced."""
