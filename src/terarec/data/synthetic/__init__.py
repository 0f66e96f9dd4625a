"""Generators of data whose best reachable score is known. One file per generator."""

from terarec.data.synthetic.criteo import GenerateReport, generate

__all__ = ["GenerateReport", "generate"]
