#define TERAREC_SET avx512
#define TERAREC_LANES 16
#define TERAREC_TABLE kAvx512Kernels
#include "embedding/isa/kernel_set.inc"
