# SPDX-License-Identifier: Apache-2.0
"""Which products of fully connected layers run by oneDNN: by processor, environment and shape."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from terarec.errors import KernelError
from terarec.kernels.environment import forced_linear
from terarec.kernels.processor import amd_family
from terarec.kernels.registry import Choice


@dataclass(frozen=True, slots=True)
class _Range:
    """Products that are faster by oneDNN.

    Attributes:
        least: Multiplications of the smallest.
        has_weight_gradients: Whether the products of two transposed matrices are among them.
        narrow: Width of the input below which all products are, from 2^22 multiplications on.
    """

    least: int
    has_weight_gradients: bool
    narrow: int = 0

    def smallest(self, in_width: int) -> int:
        """Return the multiplications of the smallest product of a layer with such an input."""
        return self.least if in_width >= self.narrow else LEAST_PRODUCTS


# MKL takes its AVX2 code on all of AMD's processors, which multiply 512 bits in one step from Zen 5 (family 26) on: 93
# GFLOP/s a core against 210 by oneDNN. A call of oneDNN takes 13 us, one of MKL 2; with so many multiplications oneDNN
# takes 0.4 to 1.2 of MKL's time (EPYC of Zen 5, torch 2.13).
LEAST_PRODUCTS = 1 << 22
_ZEN_5 = _Range(LEAST_PRODUCTS, has_weight_gradients=True)
# Zen 4 (family 25 with AVX-512) has units of 256 bits, which AVX2 fills, but MKL does not: 8192 x 1024 by 1024 x 512
# took 64 ms by it and 45 by oneDNN. oneDNN takes 0.6 to 1.05 of MKL's time, median 0.87; with 2^24 multiplications 1.0
# to 1.1, and for gradients of weights 0.9 to 1.6. Of a layer of 13 dense inputs and 512 outputs it is 0.7, 0.4 and 0.4
# (two cores of an EPYC, torch 2.13).
_ZEN_4 = _Range(1 << 26, has_weight_gradients=False, narrow=16)


def linear_choice() -> Choice:
    """Return the library that large products of float32 run by on the CPU, "onednn" or "torch", and why.

    Raises:
        KernelError: ``TERAREC_LINEAR`` has an unknown value, or requests oneDNN, which cannot run here.
    """
    return choice_and_range()[0]


@functools.cache
def choice_and_range() -> tuple[Choice, _Range | None]:
    """Return `linear_choice`, and the products that run by oneDNN; None for none."""
    forced, lack = forced_linear(), _lack()
    if forced == "onednn" and lack:
        raise KernelError("TERAREC_LINEAR", f"got 'onednn', which cannot run here: {lack}")
    if forced is not None:
        choice = Choice(implementation=forced, why="requested by TERAREC_LINEAR")
        return choice, _ZEN_5 if forced == "onednn" else None
    if reason := lack or _why_mkl_is_fast():
        return Choice(implementation="torch", why=reason), None
    if amd_family() == _FAMILY_OF_ZEN_4:
        return Choice(implementation="onednn", why="MKL is the slower one for large products on Zen 4"), _ZEN_4
    return Choice(implementation="onednn", why="MKL leaves half of this processor's AVX-512 units idle"), _ZEN_5


def least_products(is_narrow: bool, in_width: int) -> int:
    """Return the multiplications of the smallest product by oneDNN, of bfloat16 if `is_narrow`; 0 if there is none."""
    if not may_replace_torch():
        return 0
    if is_narrow:
        return LEAST_PRODUCTS if has_bfloat16() else 0
    _, products = choice_and_range()
    return 0 if products is None else products.smallest(in_width)


@functools.cache
def has_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this processor by instructions for it or by AVX-512."""
    if _lack() or not hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported"):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiplies_weight_gradients(in_width: int) -> bool:
    """Return whether gradients of weights of layers with such an input are products by oneDNN, too."""
    _, products = choice_and_range()
    return products is not None and (products.has_weight_gradients or in_width < products.narrow)


def may_replace_torch() -> bool:
    """Return whether only autograd's backward observes a product, and oneDNN is not turned off."""
    return not (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or not torch.backends.mkldnn.enabled
    )


def _lack() -> str:
    """Return the reason why oneDNN's product cannot run; empty if it can."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch has no product of oneDNN with plain weights"
    return ""


def _why_mkl_is_fast() -> str:
    """Return why `torch.nn.functional.linear` is no slower than oneDNN; empty where it is slower."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no MKL, and multiplies by another library"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "torch does not take AVX-512"
    # Zen 3 has the family of Zen 4, but no AVX-512: the test before this one has ruled it out.
    return "" if amd_family() >= _FAMILY_OF_ZEN_4 else "MKL is fast on this processor"


_FAMILY_OF_ZEN_4 = 25  # that of Zen 3, too, which has no AVX-512
