# SPDX-License-Identifier: Apache-2.0
"""Forks the Python workers of one machine, as ``python -m terarec.etl.spark.daemon``, which Spark runs.

Workers inherit the modules that tasks need. With PySpark's own daemon each imports them again: 0.75 s of a core each.
"""

from __future__ import annotations

import sys

# Spark puts its archives of PySpark first, which each process compiles again, in 0.7 s. The package has the same code.
sys.path[:] = [entry for entry in sys.path if not entry.endswith(("pyspark.zip", "-src.zip"))]

from pyspark.daemon import manager  # noqa: E402

import terarec.etl.spark.run  # noqa: E402, F401

if __name__ == "__main__":
    manager()
