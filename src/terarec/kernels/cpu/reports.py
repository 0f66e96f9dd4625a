"""Reports of the compiled core as errors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from terarec.kernels.contract import BadKeyError, bad_offsets

_NOTHING, _OFFSET = 0, 1


def raise_if_bad(report: tuple[int, int, int, int, int], num_keys: Sequence[int], layouts: Sequence[Tensor]) -> None:
    """Raise what a kernel reports as (kind, gradient, feature, position, value).

    Args:
        report: from the core; kind 0 means that nothing is wrong.
        num_keys: of each gradient, or of the one lookup.
        layouts: layout array of each.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    kind, gradient, feature, position, value = report
    if kind == _NOTHING:
        return
    if kind == _OFFSET:
        raise bad_offsets(position, value, num_keys[gradient])
    raise BadKeyError(feature, position, value, int(layouts[gradient][feature, 1]), gradient)
