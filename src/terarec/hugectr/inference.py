"""hugectr.inference: the place of HugeCTR's serving interface, which has no names here yet."""

from __future__ import annotations

from typing import NoReturn

from terarec.hugectr.errors import IllegalCallError


def __getattr__(name: str) -> NoReturn:
    if name.startswith("_"):
        raise AttributeError(name)
    # Not an AttributeError: Python would replace its message in "from hugectr.inference import ...".
    raise IllegalCallError(
        f"hugectr.inference.{name}",
        "serving through HugeCTR's interface comes later; until then, "
        "`terarec serve` and `terarec predict` serve trained models",
    )
