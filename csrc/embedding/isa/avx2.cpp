#define TERAREC_SET avx2
#define TERAREC_LANES 8
#define TERAREC_TABLE kAvx2Kernels
#include "embedding/isa/kernel_set.inc"
