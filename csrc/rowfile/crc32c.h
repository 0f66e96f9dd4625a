// SPDX-License-Identifier: Apache-2.0

// CRC-32C (Castagnoli), the checksum of pages: by the processor's instruction where it has one, else by tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace terarec::rowfile {

uint32_t crc32c(const void* data, size_t bytes);

// The implementation that calls without the processor's instruction take, for tests.
uint32_t crc32c_by_tables(const void* data, size_t bytes);

}  // namespace terarec::rowfile
