# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documentation's first page, and the figures that one of them shows; see ``tools/pictures.py``."""
