// SPDX-License-Identifier: Apache-2.0
#include "rowfile/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "common/platform.h"

namespace terarec::rowfile {
namespace {

constexpr size_t kMostSpares = 8;
constexpr size_t kAlignment = 4096;
constexpr size_t kCopied = size_t{1} << 20;

std::string described(const std::string& file, int64_t page, const std::string& problem) {
  return page < 0 ? file + ": " + problem : file + ": page " + std::to_string(page) + ": " + problem;
}

// Buffers of a block that nothing uses, of all row files.
class Spares {
 public:
  static Spares& shared() {
    static auto* const spares = new Spares;  // never destroyed: threads may outlive static objects
    return *spares;
  }

  // A buffer, or null.
  char* take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.empty()) return nullptr;
    char* memory = kept_.back();
    kept_.pop_back();
    return memory;
  }

  // False if there are enough.
  bool keep(char* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.size() == kMostSpares) return false;
    kept_.push_back(memory);
    return true;
  }

 private:
  std::mutex mutex_;
  std::vector<char*> kept_;
};

// Without O_NONBLOCK the opening of a pipe would wait for its other end.
int open_file(const std::string& path, OpenMode mode, bool direct) {
  const int flags = (mode == OpenMode::kRead ? O_RDONLY : O_RDWR | O_CREAT) | O_CLOEXEC | O_NONBLOCK;
  return direct ? open_direct(path.c_str(), flags) : open(path.c_str(), flags, 0666);
}

// Throws unless `descriptor`, which it closes then, is that of a file: a device may be endless.
void check_is_file(int descriptor, const std::string& path) {
  struct stat found{};
  if (fstat(descriptor, &found) == 0 && S_ISREG(found.st_mode)) return;
  close(descriptor);
  throw DamagedError(path, -1, "is a pipe, a device or a directory, expected a file");
}

}  // namespace

DamagedError::DamagedError(std::string file, int64_t page, const std::string& problem)
    : StoreError(described(file, page, problem)), file_(std::move(file)), page_(page) {}

void throw_system_error(const std::string& path, const char* what) {
  const int code = errno;
  const std::string message = path + ": cannot " + what + ": " + strerror(code);
  if (code == ENOENT) throw MissingError(message);
  throw StoreError(message, code);
}

AlignedBuffer::AlignedBuffer(size_t bytes) : bytes_(bytes) {
  const size_t mapped = (std::max(bytes, kAlignment) + small_page() - 1) / small_page() * small_page();
  char* memory = mapped == kBlockBytes ? Spares::shared().take() : nullptr;
  if (memory == nullptr) memory = static_cast<char*>(map_pages(mapped));
  if (memory == nullptr) throw std::bad_alloc();
  memory_ = {memory, Free{mapped}};
}

void AlignedBuffer::Free::operator()(char* memory) const {
  if (bytes != kBlockBytes || !Spares::shared().keep(memory)) unmap_pages(memory, bytes);
}

File::File(std::string path, OpenMode mode, bool direct) : path_(std::move(path)) {
  descriptor_ = open_file(path_, mode, direct);
  if (descriptor_ < 0) throw_system_error(path_, direct ? "open for direct access" : "open");
  check_is_file(descriptor_, path_);
}

File::~File() { close(descriptor_); }

int64_t File::size() const {
  struct stat found{};
  if (fstat(descriptor_, &found) != 0) throw_system_error(path_, "read the size");
  return found.st_size;
}

void File::read(void* to, size_t bytes, int64_t offset) const {
  char* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t done = pread(descriptor_, at, bytes, offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_system_error(path_, "read");
    if (done == 0) {
      throw DamagedError(path_, -1, "ends at byte " + std::to_string(offset) + ", expected " + std::to_string(bytes) +
                                        " more");
    }
    at += done, bytes -= done, offset += done;
  }
}

void File::write(const void* from, size_t bytes, int64_t offset) const {
  const char* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t done = pwrite(descriptor_, at, bytes, offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_system_error(path_, "write");
    at += done, bytes -= done, offset += done;
  }
}

void File::truncate(int64_t size) const {
  if (ftruncate(descriptor_, size) != 0) throw_system_error(path_, "truncate");
}

void File::flush() const {
  if (!flush_file(descriptor_)) throw_system_error(path_, "flush");
}

void flush_directory(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw_system_error(path, "open");
  const int result = fsync(descriptor);
  close(descriptor);
  if (result != 0) throw_system_error(path, "flush");
}

void remove_file(const std::string& path) {
  if (unlink(path.c_str()) != 0 && errno != ENOENT) throw_system_error(path, "remove");
}

void link_or_copy(const std::string& from, const std::string& to) {
  if (link(from.c_str(), to.c_str()) == 0) return;
  const File source(from, OpenMode::kRead, false);
  copy_prefix(from, to, source.size());
}

void copy_prefix(const std::string& from, const std::string& to, int64_t bytes) {
  const File source(from, OpenMode::kRead, false), target(to, OpenMode::kWrite, false);
  const AlignedBuffer buffer(kCopied);
  for (int64_t offset = 0; offset < bytes; offset += kCopied) {
    const size_t piece = std::min<int64_t>(kCopied, bytes - offset);
    source.read(buffer.get(), piece, offset);
    target.write(buffer.get(), piece, offset);
  }
  target.flush();
}

}  // namespace terarec::rowfile
