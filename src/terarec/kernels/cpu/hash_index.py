"""The hash index of host memory; the compiled one is to come under this name."""

from terarec.kernels.ref.hash_index import HashIndex

__all__ = ["HashIndex"]
