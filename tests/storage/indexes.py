# SPDX-License-Identifier: Apache-2.0
"""The implementations of the hash index that run here."""

from terarec.kernels.registry import available

INDEXES = [name for name, reason in available().items() if not reason]
"""All of them, for tests of a few keys."""
FAST_INDEXES = [name for name in INDEXES if name != "triton"]
"""Those for long tests: an interpreted Triton kernel takes milliseconds a key."""
