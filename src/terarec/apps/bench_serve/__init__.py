# SPDX-License-Identifier: Apache-2.0
"""Load on a model server of the Open Inference Protocol v2: latency, throughput and where the time goes.

See docs/serving.md.
"""
