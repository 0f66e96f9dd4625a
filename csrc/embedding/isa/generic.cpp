#define TERAREC_SET generic
#define TERAREC_LANES 4
#define TERAREC_TABLE kGenericKernels
#include "embedding/isa/kernel_set.inc"
