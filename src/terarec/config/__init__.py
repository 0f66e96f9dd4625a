# SPDX-License-Identifier: Apache-2.0
"""Specs from files and command line words and back, with the exact path in every error."""

from terarec.config.files import load_run, save_run

__all__ = ["load_run", "save_run"]
