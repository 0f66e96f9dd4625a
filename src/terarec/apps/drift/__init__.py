# SPDX-License-Identifier: Apache-2.0
"""Drift of data from a model's training data. See docs/drift.md."""
