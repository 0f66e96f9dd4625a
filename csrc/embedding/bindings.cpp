#include <nanobind/nanobind.h>

NB_MODULE(_embedding, m) { m.doc() = "Embedding kernels for CPUs."; }
