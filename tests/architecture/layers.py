# SPDX-License-Identifier: Apache-2.0
"""The dependency rules of docs/architecture.md: the packages that each package may import (all may import `errors`)."""

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "spec": {"user_code"},
    "kernels": {"spec"},
    "closer": set(),
    "user_code": set(),
    "parallel": {"closer"},
    "repeating": set(),
    "ragged": set(),
    "lazy_imports": set(),
    "ops": {"spec", "kernels"},
    "io": {"spec"},
    "formats": {"ragged", "spec", "io", "kernels"},
    "config": {"spec", "io"},
    "reports": {"spec"},
    "batch": {"spec"},
    "nn": {"spec", "ops", "batch"},
    "etl": {
        "closer",
        "lazy_imports",
        "parallel",
        "ragged",
        "spec",
        "io",
        "kernels",
        "formats",
        "reports",
        "batch",
        "user_code",
    },
    "data": {"closer", "lazy_imports", "parallel", "ragged", "spec", "io", "kernels", "formats", "batch"},
    "memory": {"closer", "parallel", "repeating", "spec", "io", "kernels", "ops", "formats"},
    "storage": {"spec", "kernels", "ops", "memory"},
    "metrics": {"ragged", "spec"},
    "optim": {"spec", "ops", "storage"},
    "embedding": {"memory", "ragged", "spec", "batch", "ops", "storage"},
    "checkpoint": {"memory", "closer", "spec", "io", "kernels", "formats", "storage"},
    "models": {
        "memory",
        "ragged",
        "spec",
        "io",
        "formats",
        "config",
        "batch",
        "nn",
        "storage",
        "embedding",
        "checkpoint",
    },
}
ALLOWED["etl"].add("user_code")
ALLOWED["dist"] = {"memory", "spec", "kernels", "io", "batch", "ops", "storage", "embedding"}
ALLOWED["train"] = set(ALLOWED) - {"etl"}
ALLOWED["ps"] = {"memory", "parallel", "repeating", "spec", "formats", "kernels", "ops", "storage", "checkpoint"}
ALLOWED["serve"] = {
    "memory",
    "closer",
    "ragged",
    "spec",
    "io",
    "formats",
    "batch",
    "data",
    "etl",
    "nn",
    "embedding",
    "models",
    "ps",
}
ALLOWED["serve"] |= {"checkpoint", "closer", "config", "export", "kernels", "parallel", "repeating", "user_code"}
ALLOWED["export"] = {"ragged", "spec", "io", "formats", "config", "batch", "nn", "embedding", "storage", "models"}
ALLOWED["export"] |= {"checkpoint", "ps", "ops", "data", "metrics"}
ALLOWED["apps"] = set(ALLOWED)
ALLOWED["keras"] = set()
ALLOWED["tensorflow"] = {"spec", "io", "kernels", "keras", "lazy_imports"}
ALLOWED["cli"] = set(ALLOWED)
ALLOWED["hugectr"] = set(ALLOWED) - {"cli"}
ALLOWED["cli"].add("hugectr")

ETL: dict[str, set[str]] = {
    "columns": set(),
    "cleaning": {"columns"},
    "times": {"columns"},
    "values": {"columns"},
    "partitions": {"columns", "values"},
    "source": {"columns", "cleaning", "times"},
    "ops": {"columns", "values", "partitions"},
    "workflow": {"columns", "values", "cleaning", "times", "source", "ops"},
    "sink": {"columns"},
    "shuffle": {"columns", "partitions", "sink"},
}
"""The parts of `etl` and the parts that each may import."""
ETL["engine"] = set(ETL)
ETL["spark"] = set(ETL)
ETL["preparation"] = set(ETL)
ETL["dry_run"] = set(ETL)
ETL["ready"] = {"ops", "times"}
