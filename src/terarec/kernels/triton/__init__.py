# SPDX-License-Identifier: Apache-2.0
"""Launchers of the Triton kernels, for NVIDIA and AMD; the kernels themselves are in `device`.

Everything stays on the device but one readback a call: a status of two words, which reports a key outside its table
or of offsets that fall. ``is_checked=False`` leaves the readback out, which capturing a CUDA graph needs: what is bad
then counts as absent. Under ``TRITON_INTERPRET=1`` the kernels run on the CPU, slowly, for tests.
"""
