# SPDX-License-Identifier: Apache-2.0
"""Functions of a package that is not terarec's."""

import pyarrow as pa

from terarec.etl.ready import row_functions


def hour_and_weekday(hours: pa.Array) -> tuple[pa.Array, pa.Array]:
    return row_functions.avazu_hour_and_weekday(hours)


def hour_and_weekday_of_record(hours: int | None) -> tuple[int | None, int | None]:
    return row_functions.avazu_hour_and_weekday_of_record(hours)
