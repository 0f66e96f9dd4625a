"""The Spark engine: the same states and the same data set as the local one, on a cluster. Described in docs/spark.md.

Everything is expressed by Spark's DataFrame functions, so no row passes through Python.
"""

from terarec.etl.spark.engine import fit, prepare

__all__ = ["fit", "prepare"]
