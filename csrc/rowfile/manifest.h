// SPDX-License-Identifier: Apache-2.0

// The manifest: which segments, and how much of each, a commit made durable.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace terarec::rowfile {

struct SegmentRecord {
  uint64_t number;
  uint64_t first_sequence, last_sequence;
  uint32_t pages;
  uint32_t has_footer;
  uint64_t footer_bytes;
};
static_assert(sizeof(SegmentRecord) == 40);

struct Manifest {
  uint64_t commit = 0;
  uint64_t next_sequence = 1;
  uint64_t next_segment = 0;
  uint64_t rows = 0;
  std::vector<SegmentRecord> segments;
  std::string metadata = "{}";

  static std::string path(const std::string& directory) { return directory + "/manifest"; }
  static Manifest read(const std::string& directory);
  // Replaces the one in the directory; durable on return.
  void write(const std::string& directory) const;
};

// Path of a segment's file.
std::string segment_path(const std::string& directory, uint64_t number);

// Number of the segment whose file has this name, or -1.
int64_t segment_number(const std::string& name);

}  // namespace terarec::rowfile
