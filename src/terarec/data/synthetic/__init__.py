"""Generators of data whose best reachable score is known. One file per generator."""

from terarec.data.synthetic.criteo import generate
from terarec.data.synthetic.raw_log import GenerateReport

__all__ = ["GenerateReport", "generate"]
