# SPDX-License-Identifier: Apache-2.0
"""Feature workflows: from raw logs to a data set, and from raw records to model inputs. See docs/workflows.md.

The functions are imported on first use: packages that serve or describe workflows need no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terarec.lazy_imports import lazy_names

if TYPE_CHECKING:
    from terarec.etl.dry_run import preview
    from terarec.etl.preparation import fit, prepare

__all__ = ["fit", "prepare", "preview"]

_HOMES = {"dry_run": ("preview",), "preparation": ("fit", "prepare")}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
