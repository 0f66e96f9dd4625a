"""Raw logs -> a data set by a feature workflow, which does the same to raw records. Described in docs/workflows.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terarec.etl.dry_run import preview
    from terarec.etl.preparation import fit, prepare

__all__ = ["fit", "prepare", "preview"]


def __getattr__(name: str) -> Any:
    """Import the functions on first use: packages below that serve or describe workflows need no engine."""
    if name not in __all__:
        raise AttributeError(f"module 'terarec.etl' has no attribute {name!r}")
    from terarec.etl import dry_run, preparation

    return getattr(dry_run if name == "preview" else preparation, name)
