// SPDX-License-Identifier: Apache-2.0

// The processes that train together, each connected to every other by TCP, and the one collective that all else is
// made of: every rank sends a part to every rank.
//
// No call waits for ever: one that makes no progress for the limit fails, and so does one whose peer closes its
// connection. From then on every call fails with the first reason, for ranks no longer agree on what comes next.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace terarec {

struct Part {
  const void* data = nullptr;
  size_t bytes = 0;
};

// A part that came from another rank.
struct ReceivedPart {
  std::unique_ptr<char[]> data;
  size_t bytes = 0;

  template <class T>
  const T* as() const { return reinterpret_cast<const T*>(data.get()); }
  template <class T>
  int64_t count() const { return static_cast<int64_t>(bytes / sizeof(T)); }
};

class Mesh {
 public:
  // sockets[r] is the connection to rank r, which the mesh closes; that of this rank is not used.
  Mesh(int rank, std::vector<int> sockets, double limit_seconds);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(sockets_.size()); }

  // For calls that belong together: all ranks make them in the same order.
  std::unique_lock<std::mutex> begin() { return std::unique_lock<std::mutex>(mutex_); }

  // Sends sent[r] to rank r and returns what each rank has sent to this one; the caller holds `begin()`. `what` names
  // the call and has to be the same on all ranks. With a `problem` of this rank no rank gets anything: each throws
  // TableError with it, and the next call works again.
  std::vector<ReceivedPart> exchange(const std::string& what, const std::vector<Part>& sent,
                                     const std::string& problem = "");

 private:
  struct Header;
  struct Peer;

  void move(const std::string& what, std::vector<Peer>& peers);
  void check(const std::string& what, const Peer& peer, int rank);
  [[noreturn]] void fail(const std::string& reason);

  const int rank_;
  const std::vector<int> sockets_;
  const double limit_seconds_;
  std::mutex mutex_;  // guards all below, and the order of what is sent
  int64_t number_ = 0;  // of the call
  std::string broken_;  // the first failure of a connection
};

// The mesh of this process; null for a process alone.
std::shared_ptr<Mesh> mesh_of_process();
void set_mesh_of_process(std::shared_ptr<Mesh> mesh);

}  // namespace terarec
