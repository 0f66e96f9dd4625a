"""The steps that call `row_functions`."""

from __future__ import annotations

from terarec.etl.ops import LambdaOp
from terarec.etl.ready import row_functions


def row_step(function: str, column: str, *outputs: str) -> LambdaOp:
    """Makes the integer columns `outputs` of `column` by the row function of that name, and its twins."""
    place = f"{row_functions.__name__}:{function}"
    return LambdaOp(
        columns=(column,),
        outputs=outputs,
        function=place,
        output_type="integer",
        spark_function=f"{place}_on_spark",
        record_function=f"{place}_of_record",
    )
