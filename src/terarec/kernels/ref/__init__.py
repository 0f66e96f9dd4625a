# SPDX-License-Identifier: Apache-2.0
"""The kernels in plain PyTorch and NumPy: the oracle of the tests, and the fallback."""
