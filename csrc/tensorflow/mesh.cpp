// SPDX-License-Identifier: Apache-2.0
#include "tensorflow/mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "tensorflow/tables.h"

namespace terarec {
namespace {

constexpr size_t kNameBytes = 96;
constexpr int kPollMilliseconds = 1000;

}  // namespace

struct Mesh::Header {
  uint64_t number, bytes, is_problem;
  char what[kNameBytes];
};

// The state of a connection in a call.
struct Mesh::Peer {
  int socket = -1;
  Header to{}, from{};
  Part part;
  size_t sent = 0, received = 0;  // bytes of the header and the part
  ReceivedPart result;

  bool has_sent() const { return sent == sizeof(Header) + part.bytes; }
  bool has_received() const { return received >= sizeof(Header) && received == sizeof(Header) + from.bytes; }
};

Mesh::Mesh(int rank, std::vector<int> sockets, double limit_seconds)
    : rank_(rank), sockets_(std::move(sockets)), limit_seconds_(limit_seconds) {}

Mesh::~Mesh() {
  for (int r = 0; r < size(); r++) {
    if (r != rank_) close(sockets_[r]);
  }
}

void Mesh::fail(const std::string& reason) {
  if (broken_.empty()) {
    broken_ = reason;
    // The others see at once that this rank takes part in nothing more.
    for (int r = 0; r < size(); r++) {
      if (r != rank_) shutdown(sockets_[r], SHUT_RDWR);
    }
  }
  throw TableError(TableError::kGone, "ranks: " + broken_);
}

void Mesh::check(const std::string& what, const Peer& peer, int rank) {
  const std::string theirs(peer.from.what, strnlen(peer.from.what, kNameBytes));
  if (peer.from.number == peer.to.number && theirs == std::string(peer.to.what, strnlen(peer.to.what, kNameBytes))) {
    return;
  }
  fail("rank " + std::to_string(rank) + " is at '" + theirs + "', this rank at '" + what +
       "', expected all ranks to look the same variables up in the same order");
}

// Sends and receives until all parts have come.
void Mesh::move(const std::string& what, std::vector<Peer>& peers) {
  using Clock = std::chrono::steady_clock;
  auto progress = Clock::now();
  std::vector<pollfd> polled(peers.size());
  for (;;) {
    bool is_complete = true, moved = false;
    for (int r = 0; r < size(); r++) {
      Peer& peer = peers[r];
      polled[r] = {-1, 0, 0};
      if (r == rank_) continue;
      while (!peer.has_sent()) {
        const size_t of_part = peer.sent > sizeof(Header) ? peer.sent - sizeof(Header) : 0;
        const size_t of_header = std::min(peer.sent, sizeof(Header));
        iovec pieces[2] = {{reinterpret_cast<char*>(&peer.to) + of_header, sizeof(Header) - of_header},
                           {const_cast<char*>(static_cast<const char*>(peer.part.data)) + of_part,
                            peer.part.bytes - of_part}};
        const ssize_t count = writev(peer.socket, pieces, 2);
        if (count <= 0) {
          if (count < 0 && errno == EINTR) continue;
          if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
          fail("rank " + std::to_string(r) + " has closed its connection in '" + what + "': it has ended or failed");
        }
        peer.sent += static_cast<size_t>(count);
        moved = true;
      }
      while (!peer.has_received()) {
        const bool is_header = peer.received < sizeof(Header);
        char* const to = is_header ? reinterpret_cast<char*>(&peer.from) + peer.received
                                   : peer.result.data.get() + (peer.received - sizeof(Header));
        const size_t left = is_header ? sizeof(Header) - peer.received
                                      : peer.from.bytes - (peer.received - sizeof(Header));
        const ssize_t count = recv(peer.socket, to, left, 0);
        if (count <= 0) {
          if (count < 0 && errno == EINTR) continue;
          if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
          fail("rank " + std::to_string(r) + " has closed its connection in '" + what + "': it has ended or failed");
        }
        peer.received += static_cast<size_t>(count);
        moved = true;
        if (peer.received == sizeof(Header)) {
          check(what, peer, r);
          peer.result.bytes = peer.from.bytes;
          peer.result.data.reset(new char[peer.from.bytes]);
        }
      }
      if (peer.has_sent() && peer.has_received()) continue;
      is_complete = false;
      polled[r].fd = peer.socket;
      polled[r].events = static_cast<short>((peer.has_sent() ? 0 : POLLOUT) | (peer.has_received() ? 0 : POLLIN));
    }
    if (is_complete) return;
    if (moved) {
      progress = Clock::now();
      continue;
    }
    poll(polled.data(), polled.size(), kPollMilliseconds);
    if (std::chrono::duration<double>(Clock::now() - progress).count() < limit_seconds_) continue;
    std::string waiting;
    for (int r = 0; r < size(); r++) {
      if (polled[r].fd >= 0) waiting += (waiting.empty() ? "" : ", ") + std::to_string(r);
    }
    fail("no answer of rank " + waiting + " for " + std::to_string(static_cast<int64_t>(limit_seconds_)) + " s in '" +
         what + "'");
  }
}

std::vector<ReceivedPart> Mesh::exchange(const std::string& what, const std::vector<Part>& sent,
                                         const std::string& problem) {
  if (!broken_.empty()) fail(broken_);
  number_++;
  std::vector<Peer> peers(sockets_.size());
  for (int r = 0; r < size(); r++) {
    Peer& peer = peers[r];
    peer.socket = sockets_[r];
    peer.part = problem.empty() ? sent[r] : Part{problem.data(), problem.size()};
    peer.to.number = static_cast<uint64_t>(number_);
    peer.to.bytes = peer.part.bytes;
    peer.to.is_problem = !problem.empty();
    memcpy(peer.to.what, what.data(), std::min(what.size(), kNameBytes));
  }
  Peer& own = peers[rank_];
  own.result.bytes = own.part.bytes;
  own.result.data.reset(new char[own.part.bytes]);
  if (own.part.bytes) memcpy(own.result.data.get(), own.part.data, own.part.bytes);
  move(what, peers);
  if (!problem.empty()) throw TableError(TableError::kInvalid, problem);
  std::vector<ReceivedPart> results;
  for (int r = 0; r < size(); r++) {
    ReceivedPart& result = peers[r].result;
    if (r != rank_ && peers[r].from.is_problem) {
      throw TableError(TableError::kInvalid,
                       "rank " + std::to_string(r) + ": " + std::string(result.data.get(), result.bytes));
    }
    results.push_back(std::move(result));
  }
  return results;
}

namespace {

std::mutex mutex_of_mesh;

// Never destroyed: kernels may outlive static objects. The system closes the connections.
std::shared_ptr<Mesh>& only_mesh() {
  static auto* const mesh = new std::shared_ptr<Mesh>;
  return *mesh;
}

}  // namespace

std::shared_ptr<Mesh> mesh_of_process() {
  const std::lock_guard<std::mutex> lock(mutex_of_mesh);
  return only_mesh();
}

void set_mesh_of_process(std::shared_ptr<Mesh> mesh) {
  const std::lock_guard<std::mutex> lock(mutex_of_mesh);
  only_mesh() = std::move(mesh);
}

}  // namespace terarec
