"""The dependency rules of docs/architecture.md: the packages that each package may import (all may import `errors`)."""

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "spec": set(),
    "kernels": {"spec"},
    "parallel": set(),
    "ragged": set(),
    "lazy_imports": set(),
    "ops": {"spec", "kernels"},
    "io": {"spec"},
    "formats": {"ragged", "spec", "io", "kernels"},
    "config": {"spec", "io"},
    "reports": {"spec"},
    "batch": {"spec"},
    "nn": {"spec", "ops", "batch"},
    "etl": {"lazy_imports", "parallel", "ragged", "spec", "io", "kernels", "formats", "reports", "batch"},
    "data": {"lazy_imports", "parallel", "ragged", "spec", "io", "kernels", "formats", "batch"},
    "storage": {"parallel", "spec", "io", "kernels", "ops", "formats"},
    "metrics": {"ragged", "spec"},
    "optim": {"spec", "ops", "storage"},
    "embedding": {"ragged", "spec", "batch", "ops", "storage"},
    "checkpoint": {"spec", "io", "kernels", "formats", "storage"},
    "models": {"ragged", "spec", "io", "formats", "config", "batch", "nn", "storage", "embedding", "checkpoint"},
}
ALLOWED["dist"] = {"spec", "kernels", "io", "batch", "ops", "storage", "embedding"}
ALLOWED["train"] = set(ALLOWED) - {"etl"}
ALLOWED["ps"] = {"parallel", "spec", "io", "formats", "kernels", "ops", "storage", "checkpoint"}
ALLOWED["serve"] = {"ragged", "spec", "io", "formats", "batch", "data", "etl", "nn", "embedding", "models", "ps"}
ALLOWED["serve"] |= {"checkpoint", "config", "export", "kernels"}
ALLOWED["export"] = {"ragged", "spec", "io", "formats", "config", "batch", "nn", "embedding", "storage", "models"}
ALLOWED["export"] |= {"checkpoint", "ps", "ops", "data", "metrics"}
ALLOWED["recipes"] = {"spec", "io", "formats", "etl", "train"}
ALLOWED["cli"] = set(ALLOWED)
ALLOWED["hugectr"] = set(ALLOWED) - {"cli"}
ALLOWED["cli"].add("hugectr")

ETL: dict[str, set[str]] = {
    "columns": set(),
    "cleaning": {"columns"},
    "values": {"columns"},
    "partitions": {"columns", "values"},
    "source": {"columns", "cleaning"},
    "tensors": {"columns", "values"},
    "ops": {"columns", "values", "partitions", "tensors"},
    "workflow": {"columns", "values", "cleaning", "ops"},
    "sink": {"columns"},
    "shuffle": {"columns", "partitions", "sink"},
}
"""The parts of `etl` and the parts that each may import."""
ETL["engine"] = set(ETL)
ETL["spark"] = set(ETL)
ETL["preparation"] = set(ETL)
ETL["dry_run"] = set(ETL)
ETL["device"] = {"columns", "tensors", "ops", "workflow"}
ETL["ready"] = {"ops"}
ETL["sample"] = {"columns", "cleaning", "source"}
ETL["draft"] = {"ops", "sample"}
ETL["drift"] = {"source", "ops", "workflow", "values"}
