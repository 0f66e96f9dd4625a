# SPDX-License-Identifier: Apache-2.0
"""Preparation on a Spark cluster, by the parser, the operators and the states of the local engine.

Spark splits the sources, runs tasks, repeats those that fail, and shuffles; what a task does to its rows is the code of
the local engine, so states and data sets are the same. PySpark is imported when a run starts.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from terarec.errors import ClusterError, MissingDependencyError
from terarec.etl.engine.run import StartRun
from terarec.kernels.environment import java_home
from terarec.spec import PrepareOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def spark_runs(options: PrepareOptions) -> Iterator[StartRun]:
    """Yield the function that starts a run, on a session that ends with the block."""
    check_spark()
    from functools import partial

    from terarec.etl.spark.jobs import spark_errors
    from terarec.etl.spark.run import SparkRun

    with spark_errors(), spark_session(options.spark_master, options.spark_conf) as spark:
        yield partial(SparkRun, spark)


LEAST_JAVA = 17
_DEFAULT_MASTER = "local[*]"
_STANDALONE = "spark://"
_LOCAL = "local"
_LOCAL_SETTINGS = {
    "spark.python.daemon.module": "terarec.etl.spark.daemon",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
"""Defaults where driver and executors are one process, whose Python has terarec. Java does little here: with its second
compiler and parallel collector 5 M rows of Criteo cost it 4.3 s of a core, without 1.5 s (Zen 3)."""
_PATIENCE = 10.0
"""Seconds for a master to answer."""


def check_spark() -> None:
    """Raise unless PySpark can be imported and there is a Java that it runs on.

    Raises:
        MissingDependencyError: PySpark or Java is missing, or too old; the message has the version that was found.
    """
    try:
        import pyspark.sql  # heavy, and only this engine needs it
    except ImportError as error:
        raise MissingDependencyError("pyspark", "not installed, expected pip install 'terarec[spark]'") from error
    if int(pyspark.__version__.split(".")[0]) < 4:
        raise MissingDependencyError("pyspark", f"version {pyspark.__version__} is installed, expected 4 or later")
    home = java_home()
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    version = None if java is None else _java_version(java)
    if java is None or version is None:
        problem = "none on PATH, and JAVA_HOME is not set" if java is None else f"{java}, which does not run"
        raise MissingDependencyError("Java", f"found {problem}, expected version {LEAST_JAVA} or later for Spark")
    if version < LEAST_JAVA:
        raise MissingDependencyError(
            "Java", f"found version {version} at {java}, expected {LEAST_JAVA} or later for Spark"
        )


@contextmanager
def spark_session(master: str | None, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """Yield a session of the running Spark application, or of a new one that ends with the block.

    Args:
        master: Spark's master URL; None takes the running application, the one that ``spark-submit`` names, or all
            cores of this machine.
        settings: Further settings of Spark.
    """
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    base = running or _application(master, settings)
    session = base.newSession()  # the running application keeps its own settings
    if str(base.sparkContext.master).startswith(_LOCAL):
        base.sparkContext.pythonExec = sys.executable  # Spark would take the first python3 on PATH
    try:
        for name, value in settings.items():
            # A running application takes no other memory or cores; Spark would raise.
            if session.conf.isModifiable(name):
                session.conf.set(name, value)
        yield session
    finally:
        if running is None:
            # An application of the caller continues.
            base.stop()


def _application(master: str | None, settings: Mapping[str, str]) -> SparkSession:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    configured = SparkConf()
    builder = SparkSession.builder.appName("terarec prepare")
    if master is not None:
        check_master(master)
    # spark-submit and spark-defaults.conf may name a master.
    if master is not None or not configured.contains("spark.master"):
        builder = builder.master(master or _DEFAULT_MASTER)
    defaults = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    if (master or configured.get("spark.master", _DEFAULT_MASTER) or "").startswith(_LOCAL):
        defaults |= {name: value for name, value in _LOCAL_SETTINGS.items() if not configured.contains(name)}
    for name, value in {**defaults, **settings}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def check_master(master: str) -> None:
    """Raise unless a standalone master answers; Spark itself would retry for a minute and print a stack trace."""
    if not master.startswith(_STANDALONE):
        return
    unreachable = ""
    for address in master.removeprefix(_STANDALONE).split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
            return
        except (OSError, ValueError, OverflowError) as error:
            unreachable = f"{address}: {error}"
    raise ClusterError("spark_master", f"got {master!r}, where no master answers ({unreachable})")


def _java_version(java: str) -> int | None:
    """Return the major version of the Java program `java`; None if it does not run."""
    try:
        # Java writes its version to stderr.
        shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', shown)
    return None if match is None else int(match[1])
