# SPDX-License-Identifier: Apache-2.0
"""The ready workflows give the same data sets on Spark."""

import pytest

from terarec.etl import prepare
from terarec.etl.ready import PRESETS
from terarec.etl.workflow import Workflow
from terarec.spec import PrepareOptions
from tests.etl.ready.prepared import CASES, make
from tests.etl.spark.comparing import assert_same
from tests.etl.spark.conftest import on_spark

pytestmark = [pytest.mark.usefixtures("spark"), pytest.mark.slow]


@pytest.mark.parametrize("name", CASES)
def test_spark_gives_the_same_data_set(tmp_path, name):
    made, case = make(name, tmp_path, 200 if name == "mind" else 600), CASES[name]
    layout = {} if case.layout is None else {"layout": case.layout}
    tables = {table: (str(made.raw / file),) for table, file in case.tables.items()}
    options = on_spark(PrepareOptions(tables=tables, **case.options))
    sources = [made.raw / file for file in case.sources]
    prepare(Workflow.of(PRESETS[case.workflow](**layout)), sources, tmp_path / "spark", options)
    assert_same(tmp_path / "spark", made.out)
