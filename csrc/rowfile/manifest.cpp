// SPDX-License-Identifier: Apache-2.0
#include "rowfile/manifest.h"

#include <cstdio>
#include <cstring>

#include "common/bytes.h"
#include "rowfile/crc32c.h"
#include "rowfile/file.h"

namespace terarec::rowfile {
namespace {

constexpr char kMagic[8] = {'T', 'R', 'R', 'O', 'W', 'S', 'M', 'F'};
constexpr uint32_t kVersion = 1;

struct ManifestHeader {
  char magic[8];
  uint32_t version;
  uint32_t checksum;  // of all bytes behind it
  uint64_t commit, next_sequence, next_segment, rows;
  uint64_t num_segments, metadata_bytes;
};
static_assert(sizeof(ManifestHeader) == 64);
constexpr size_t kBehindChecksum = 16;

}  // namespace

Manifest Manifest::read(const std::string& directory) {
  const File file(path(directory), OpenMode::kRead, false);
  const int64_t size = file.size();
  ManifestHeader header;
  if (size < static_cast<int64_t>(sizeof(header)) || size > (int64_t{1} << 31)) {
    throw DamagedError(file.path(), -1, "got " + std::to_string(size) + " bytes, expected a manifest");
  }
  std::string content(static_cast<size_t>(size), '\0');
  file.read(content.data(), content.size(), 0);
  memcpy(&header, content.data(), sizeof(header));
  if (memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) throw DamagedError(file.path(), -1, "not a manifest");
  if (header.version == 0 || header.version > kVersion) {
    throw DamagedError(file.path(), -1, "got version " + std::to_string(header.version) + ", expected 1 to " +
                                            std::to_string(kVersion));
  }
  if (crc32c(content.data() + kBehindChecksum, content.size() - kBehindChecksum) != header.checksum) {
    throw DamagedError(file.path(), -1, "got another checksum than the one of its content");
  }
  const uint64_t expected = sizeof(header) + header.num_segments * sizeof(SegmentRecord) + header.metadata_bytes;
  if (header.num_segments > content.size() || header.metadata_bytes > content.size() || expected != content.size()) {
    throw DamagedError(file.path(), -1, "got " + std::to_string(size) + " bytes, expected " + std::to_string(expected));
  }
  Manifest manifest;
  manifest.commit = header.commit;
  manifest.next_sequence = header.next_sequence;
  manifest.next_segment = header.next_segment;
  manifest.rows = header.rows;
  manifest.segments.resize(header.num_segments);
  const char* at = content.data() + sizeof(header);
  const size_t bytes = manifest.segments.size() * sizeof(SegmentRecord);
  copy_bytes(manifest.segments.data(), at, bytes);
  manifest.metadata.assign(at + bytes, header.metadata_bytes);
  return manifest;
}

void Manifest::write(const std::string& directory) const {
  ManifestHeader header{};
  memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.commit = commit;
  header.next_sequence = next_sequence;
  header.next_segment = next_segment;
  header.rows = rows;
  header.num_segments = segments.size();
  header.metadata_bytes = metadata.size();
  std::string content(reinterpret_cast<const char*>(&header), sizeof(header));
  content.append(reinterpret_cast<const char*>(segments.data()), segments.size() * sizeof(SegmentRecord));
  content += metadata;
  const uint32_t checksum = crc32c(content.data() + kBehindChecksum, content.size() - kBehindChecksum);
  memcpy(content.data() + offsetof(ManifestHeader, checksum), &checksum, sizeof(checksum));
  const std::string partial = path(directory) + ".partial";
  try {
    const File file(partial, OpenMode::kWrite, false);
    file.truncate(0);
    file.write(content.data(), content.size(), 0);
    file.flush();
  } catch (const StoreError&) {
    ::remove(partial.c_str());
    throw;
  }
  if (rename(partial.c_str(), path(directory).c_str()) != 0) throw_system_error(path(directory), "replace");
  flush_directory(directory);
}

std::string segment_path(const std::string& directory, uint64_t number) {
  char name[32];
  snprintf(name, sizeof(name), "/segment-%012llx.rows", static_cast<unsigned long long>(number));
  return directory + name;
}

int64_t segment_number(const std::string& name) {
  unsigned long long number = 0;
  int end = 0;
  if (sscanf(name.c_str(), "segment-%12llx.rows%n", &number, &end) != 1) return -1;
  return end == static_cast<int>(name.size()) && name.size() == 25 ? static_cast<int64_t>(number) : -1;
}

}  // namespace terarec::rowfile
