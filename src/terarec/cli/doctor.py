"""``terarec doctor``: versions, hardware, active kernels and why, and a check that the compiled core works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terarec.cli.show import Show


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """``terarec doctor`` takes nothing but what every command takes."""


def doctor(options: DoctorOptions, show: Show) -> None:
    """Show versions, hardware and active kernels; check the core."""
    del options
    found = examine()
    for section, told in found.items():
        if isinstance(told, Mapping):
            show.figures(section, {name: _words(value) for name, value in told.items()})
        elif isinstance(told, list):
            show.table(section, told)
    show.line("All is well." if found["ok"] else "Not all is well: see check.")
    show.json(found)


def examine() -> dict[str, Any]:
    """Everything that ``terarec doctor`` tells, as JSON data; docs/cli.md describes it."""
    from terarec.cli import doctor_host, doctor_kernels, doctor_software

    check = doctor_kernels.check()
    return {
        "ok": check["passed"],
        "versions": doctor_software.versions(),
        "cpu": doctor_host.processor(),
        "memory": {**doctor_host.memory(), "transparent_huge_pages": doctor_host.huge_pages()},
        "disk": doctor_host.disk(Path.cwd()),
        # After the check, which has made the compiled core look for its threads.
        "threads": {**doctor_kernels.threads(), "openmp_runtimes": doctor_host.openmp_runtimes()},
        "kernels": doctor_kernels.choices(),
        "gpu": doctor_software.gpu(),
        "training": doctor_kernels.training(),
        "extras": doctor_software.extras(),
        "check": check,
    }


def _words(value: Any) -> Any:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
