"""``--checkpoint``, which every command that opens a RUN takes."""

from __future__ import annotations

from typing import Annotated

import typer

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="STEP|best|last",
        help="Which checkpoint of RUN; the last one, or the best one of a run with training.patience.",
    ),
]
