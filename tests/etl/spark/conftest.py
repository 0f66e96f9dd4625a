# SPDX-License-Identifier: Apache-2.0
"""One Spark session for all tests of the engine; without PySpark or Java they are skipped, and say why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from terarec.errors import MissingDependencyError
from terarec.etl.spark import check_spark
from terarec.spec import PrepareOptions
from tests.programs import JAVA

SMALL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "768m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "OFF",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    # Many blocks of a file, so that ids cannot come out right by chance.
    "spark.sql.files.maxPartitionBytes": "16384",
    "spark.sql.files.openCostInBytes": "4096",
    # Compiling a plan takes far longer than a few hundred rows; the test on a standalone cluster compiles them.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def on_spark(options: PrepareOptions) -> PrepareOptions:
    """The same for this engine."""
    settings = {name: value for name, value in SMALL.items() if name.startswith("spark.sql")}
    return dataclasses.replace(options, engine="spark", spark_master="local[2]", spark_conf=settings)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    try:
        check_spark()
    except MissingDependencyError as error:
        JAVA.require()
        pytest.skip(str(error))
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("tests")
    for name, value in SMALL.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()
