"""The one place that reads terarec's environment variables.

``TERAREC_CPU`` = ``generic``, ``avx2`` or ``avx512`` forces the instruction set of the compiled kernels.
``TRITON_INTERPRET`` = ``1``, which is Triton's own, makes its kernels run on the CPU, slowly.
"""

from __future__ import annotations

import os

from terarec.errors import KernelError

CPU_SETS = ("generic", "avx2", "avx512")


def forced_cpu() -> str | None:
    """The instruction set that ``TERAREC_CPU`` asks for; None if it is not set.

    Raises:
        KernelError: an unknown value.
    """
    value = os.environ.get("TERAREC_CPU")
    if not value:
        return None
    if value not in CPU_SETS:
        raise KernelError(f"TERAREC_CPU: got {value!r}, expected one of {', '.join(CPU_SETS)}")
    return value


def triton_interprets() -> bool:
    """Whether Triton, loaded now, would interpret its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
