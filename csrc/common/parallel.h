// SPDX-License-Identifier: Apache-2.0

// A fork-join over the OpenMP team that torch already runs.
//
// The modules link no OpenMP runtime. Two runtimes in one process mean two teams on the same cores, which cost 15 to
// 20 % when lookups alternate with GEMMs; so the runtime that is loaded (torch's libgomp, or libomp, which exports the
// same entry points) is found by name at the first call. A process without one gets plain threads.
#pragma once

#include <cstdint>
#include <type_traits>

namespace terarec {

// "openmp (<path of the library>)" or "std::thread".
const char* parallel_runtime();

// Runs body(context, unit) for every unit in [0, units), each once, on up to `threads` threads in any order.
// Returns when all are done. The first exception thrown by a body is rethrown here.
void parallel_for(int threads, int64_t units, void (*body)(void* context, int64_t unit), void* context);

template <class Body>
void parallel_for(int threads, int64_t units, Body&& body) {
  using Plain = typename std::remove_reference<Body>::type;
  parallel_for(
      threads, units, [](void* context, int64_t unit) { (*static_cast<Plain*>(context))(unit); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace terarec
