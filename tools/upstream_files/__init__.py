# SPDX-License-Identifier: Apache-2.0
"""Parts of ``tools/upstream.py``, which runs the files of a checkout of HugeCTR."""
