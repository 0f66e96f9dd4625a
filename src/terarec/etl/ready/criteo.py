"""Criteo's click logs, of the Kaggle contest and of 24 days (1 TB)."""

from __future__ import annotations

from typing import Literal

from terarec.errors import ConfigError
from terarec.etl.ops import Categorify, FillMissing, LambdaOp, LogOp
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, SplitByFiles, SplitByFraction, WorkflowSpec

LABEL_NAME = "label"
INTEGER_NAMES = tuple(f"I{number}" for number in range(1, 14))
CATEGORY_NAMES = tuple(f"C{number}" for number in range(1, 27))
"""The columns of a line, in this order."""

_SPLIT = SplitByFraction(valid=0.1)


def criteo(
    *, min_count: int = 15, split: Split | None = _SPLIT, modulo: Literal[10_000_000, 40_000_000] | None = None
) -> WorkflowSpec:
    """Prepares ``train.txt`` of Kaggle: a label, 13 integers and 26 categories a line.

    A missing integer is 0, integers are shifted to at least 1 and their logarithm is taken, categories become ids.

    Args:
        min_count: categories that occur less often in the training part share an id.
        split: by default the last tenth of the rows.
        modulo: categories are taken modulo this first, as some published sizes have them; None: as they are.
    """
    return WorkflowSpec(
        name="criteo",
        source=SourceSpec(
            format="delimited",
            columns=(
                SourceColumn(name=LABEL_NAME, type="integer"),
                *(SourceColumn(name=name, type="integer") for name in INTEGER_NAMES),
                *(SourceColumn(name=name, type="hex32") for name in CATEGORY_NAMES),
            ),
        ),
        steps=(
            FillMissing(columns=INTEGER_NAMES, value=0.0),
            LogOp(columns=INTEGER_NAMES, shift=None),
            *_modulo(modulo),
            Categorify(columns=CATEGORY_NAMES, min_count=min_count),
        ),
        split=split,
        labels=(LabelSpec(name=LABEL_NAME, is_probability=True),),
        dense=INTEGER_NAMES,
        categorical=CATEGORY_NAMES,
    )


def criteo_terabyte(*, min_count: int = 15) -> WorkflowSpec:
    """The same for the 24 files ``day_0`` to ``day_23``; the last of them is the split "valid".

    Args:
        min_count: as for `criteo`.
    """
    return criteo(min_count=min_count, split=SplitByFiles(valid=1))


def _modulo(modulo: int | None) -> tuple[LambdaOp, ...]:
    names = {None: "", 10_000_000: "modulo_10_million", 40_000_000: "modulo_40_million"}
    if modulo not in names:
        raise ConfigError(f"criteo: modulo: got {modulo!r}, expected one of None, 10000000, 40000000")
    if modulo is None:
        return ()
    function = f"terarec.etl.ready.row_functions:{names[modulo]}"
    return (
        LambdaOp(
            columns=CATEGORY_NAMES,
            outputs=CATEGORY_NAMES,
            function=function,
            output_type="integer",
            spark_function=f"{function}_on_spark",
            record_function=f"{function}_of_record",
        ),
    )
