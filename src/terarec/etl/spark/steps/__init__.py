"""The steps of a workflow as expressions of Spark: one file for each family, found by `terarec.etl.spark.steps.run`."""
