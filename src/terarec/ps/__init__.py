# SPDX-License-Identifier: Apache-2.0
"""The parameter server: tables of served models in tiers (host memory, Redis or Valkey, disk), looked up in batches."""

from terarec.ps.loading import Loading
from terarec.ps.server import ParameterServer

__all__ = ["Loading", "ParameterServer"]
