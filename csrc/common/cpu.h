// Which vector instructions this CPU and its operating system offer.
#pragma once

namespace terarec {

bool cpu_has_avx2();    // AVX2, FMA and F16C
bool cpu_has_avx512();  // AVX-512 F, BW, DQ and VL

}  // namespace terarec
