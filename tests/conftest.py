"""Settings that must stand before torch starts its threads."""

import os

# Two test workers share two cores: waiting threads sleep instead of spinning against each other's work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "2")
