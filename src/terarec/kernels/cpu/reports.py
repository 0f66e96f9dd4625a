"""Reports of the compiled core as errors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.contract import BadKeyError, bad_offsets

Report = tuple[int, int, int, int, int]
"""(kind, gradient, feature, position, value), kind 0 meaning that nothing is wrong."""
_OFFSET = 1


def error_of(report: Report, num_keys: Sequence[int], layouts: Sequence[Tensor]) -> BadKeyError | ConfigError:
    """What a kernel reports, as an error.

    Args:
        report: from the core, of another kind than 0.
        num_keys: of each gradient, or of the one lookup.
        layouts: layout array of each.

    Returns:
        A `BadKeyError` for a key outside its table, a `ConfigError` for offsets that fall or do not cover the keys.
    """
    kind, gradient, feature, position, value = report
    if kind == _OFFSET:
        return bad_offsets(position, value, num_keys[gradient])
    return BadKeyError(feature, position, value, int(layouts[gradient][feature, 1]), gradient)
