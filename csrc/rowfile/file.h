// SPDX-License-Identifier: Apache-2.0

// Files of a row file, and the errors that name them.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace terarec::rowfile {

// The disk or the store cannot do what was requested.
class StoreError : public std::runtime_error {
 public:
  // `code` is the number of the system's error, 0 for none.
  explicit StoreError(const std::string& message, int code = 0) : std::runtime_error(message), code_(code) {}

  int code() const { return code_; }

 private:
  int code_;
};

// A file does not hold what was written to it.
class DamagedError : public StoreError {
 public:
  // `page` is -1 if it is not one page that is damaged.
  DamagedError(std::string file, int64_t page, const std::string& problem);

  const std::string& file() const { return file_; }
  int64_t page() const { return page_; }

 private:
  std::string file_;
  int64_t page_;
};

// A file does not exist: another process may have replaced the files that refer to it.
class MissingError : public StoreError {
 public:
  using StoreError::StoreError;
};

// Throws StoreError of the system's last error.
[[noreturn]] void throw_system_error(const std::string& path, const char* what);

// Bytes of the pages that are written at once.
inline constexpr size_t kBlockBytes = size_t{1} << 20;

// Memory of a whole number of 4,096 bytes, aligned to as many, which direct reads and writes need.
//
// It is mapped, not from the heap: glibc 2.36 does not reuse a freed aligned block for one of its size, so that writing
// 1 GB left 24 MiB of holes there. A few of the size of a block are kept for the next, since mapping touches pages.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes);

  char* get() const { return memory_.get(); }
  size_t size() const { return bytes_; }

 private:
  struct Free {
    size_t bytes;
    void operator()(char* memory) const;
  };
  std::unique_ptr<char, Free> memory_{nullptr, Free{0}};
  size_t bytes_ = 0;
};

enum class OpenMode { kRead, kWrite };

class File {
 public:
  // Opens an existing file, or with kWrite also creates it. Throws StoreError, MissingError if there is none to read.
  File(std::string path, OpenMode mode, bool direct);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const { return descriptor_; }
  const std::string& path() const { return path_; }
  int64_t size() const;

  // Reads all bytes. Throws DamagedError if the file ends before.
  void read(void* to, size_t bytes, int64_t offset) const;
  void write(const void* from, size_t bytes, int64_t offset) const;
  void truncate(int64_t size) const;
  // Returns once what was written is on the disk.
  void flush() const;

 private:
  std::string path_;
  int descriptor_;
};

// Makes the names in a directory durable.
void flush_directory(const std::string& path);

// Removes a file, if it is there.
void remove_file(const std::string& path);

// Gives a file, or its first bytes, a second name or a copy.
void link_or_copy(const std::string& from, const std::string& to);
void copy_prefix(const std::string& from, const std::string& to, int64_t bytes);

}  // namespace terarec::rowfile
