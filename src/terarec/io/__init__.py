# SPDX-License-Identifier: Apache-2.0
"""Files and directories: atomic writing, locks, URLs, JSON."""
