# SPDX-License-Identifier: Apache-2.0
"""Launchers of the compiled core: they check types and shapes, and convert its reports to errors."""
