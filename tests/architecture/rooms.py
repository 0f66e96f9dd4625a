"""The floor plan that docs/architecture.md draws: each room and the rooms it may import (`errors` is free to all)."""

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "spec": set(),
    "kernels": set(),
    "ops": {"kernels"},
    "formats": {"spec"},
    "config": {"spec"},
    "batch": {"spec"},
    "nn": {"spec", "ops"},
    "etl": {"spec", "kernels", "formats"},
    "data": {"spec", "kernels", "formats", "batch"},
    "storage": {"spec", "kernels", "ops", "formats"},
    "metrics": {"spec"},
    "optim": {"spec", "ops", "storage"},
    "embedding": {"spec", "batch", "ops", "storage"},
    "checkpoint": {"spec", "formats", "storage"},
    "models": {"spec", "formats", "config", "batch", "nn", "embedding", "checkpoint"},
}
ALLOWED["train"] = set(ALLOWED) - {"etl"}
ALLOWED["serve"] = {"spec", "formats", "batch", "etl", "embedding", "models", "checkpoint"}
ALLOWED["export"] = {"spec", "formats", "nn", "embedding", "storage", "models"}
ALLOWED["cli"] = set(ALLOWED)
ALLOWED["hugectr"] = set(ALLOWED) - {"cli"}
