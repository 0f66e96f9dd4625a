# SPDX-License-Identifier: Apache-2.0
"""Generators of data whose best reachable score is known. One file per generator."""

from terarec.apps.synthetic.criteo import generate

__all__ = ["generate"]
