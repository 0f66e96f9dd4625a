# SPDX-License-Identifier: Apache-2.0
"""Readable output: numbers as text, progress bars, and reports as one self-contained HTML file."""
