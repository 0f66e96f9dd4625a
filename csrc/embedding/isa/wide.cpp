#define TERAREC_SET wide
#define TERAREC_LANES 16
#define TERAREC_TABLE kWideKernels
#include "embedding/isa/kernel_set.inc"
