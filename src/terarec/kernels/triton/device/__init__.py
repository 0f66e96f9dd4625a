# SPDX-License-Identifier: Apache-2.0
"""Device code, compiled by `triton.jit`. Offsets are int64 throughout, since rows * width passes 2^31.

A loaded row number carries its own mask (-1 where there is none): Triton 3.6 does not compile tiles of fewer rows than
threads in which one mask serves a load of one dimension and one of two (its pass that removes conversions of layouts
gives the mask another layout). `tests/kernels/triton_compile.py` compiles every kernel without a GPU.
"""
