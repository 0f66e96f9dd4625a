// SPDX-License-Identifier: Apache-2.0
#include "tensorflow/rank_tables.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "embedding/hash_index.h"

namespace terarec {
namespace {

// The distinct ids of a call by their owners.
struct Route {
  std::vector<int64_t> places;  // of each id of the call, among the distinct ones
  std::vector<int64_t> rows;    // the distinct ids as the owners know them, those of rank 0 first
  std::vector<int64_t> begin;   // of each rank's in `rows`, and the end
  std::string problem;

  std::vector<Part> parts(const void* data, size_t bytes_per_row) const {
    std::vector<Part> all;
    for (size_t r = 0; r + 1 < begin.size(); r++) {
      all.push_back({static_cast<const char*>(data) + begin[r] * bytes_per_row,
                     static_cast<size_t>(begin[r + 1] - begin[r]) * bytes_per_row});
    }
    return all;
  }
};

int64_t owner_of(int64_t id, int64_t home, int64_t ranks) {
  return home >= 0 ? home : (id % ranks + ranks) % ranks;
}

Route route_of(const Mesh& mesh, const Table& table, const Placement& placement, const Bags& bags, int threads) {
  Route route;
  const int64_t ranks = mesh.size(), count = bags.num_ids;
  route.begin.assign(ranks + 1, 0);
  for (int64_t i = 0; placement.rows >= 0 && i < count; i++) {
    if (bags.ids[i] >= 0 && bags.ids[i] < placement.rows) continue;
    route.problem = "ids: got " + std::to_string(bags.ids[i]) + " at position " + std::to_string(i) +
                    ", expected 0 <= id < " + std::to_string(placement.rows) + ", the rows of variable '" +
                    table.name() + "'";
    return route;
  }
  std::vector<int64_t> numbers(count), distinct(count);
  HashIndex index(mix(kMixStep));
  distinct.resize(index.insert({bags.ids, count}, numbers.data(), {nullptr, 0, 0, 1}, distinct.data(), threads));
  for (const int64_t id : distinct) route.begin[owner_of(id, placement.home, ranks) + 1]++;
  for (int64_t r = 0; r < ranks; r++) route.begin[r + 1] += route.begin[r];
  std::vector<int64_t> next(route.begin), place(distinct.size());
  const bool divides = placement.home < 0 && placement.rows >= 0;
  route.rows.resize(distinct.size());
  for (size_t d = 0; d < distinct.size(); d++) {
    place[d] = next[owner_of(distinct[d], placement.home, ranks)]++;
    route.rows[place[d]] = divides ? distinct[d] / ranks : distinct[d];
  }
  route.places.resize(count);
  for (int64_t i = 0; i < count; i++) route.places[i] = place[numbers[i]];
  return route;
}

Bags at_places(const Route& route, const Bags& bags) {
  Bags local = bags;
  local.ids = route.places.data();
  return local;
}

Bags single(const std::vector<int64_t>& ids) {
  return {ids.data(), static_cast<int64_t>(ids.size()), nullptr, 0, nullptr, Pooling::kNone};
}

template <class T>
std::vector<T> joined(const std::vector<ReceivedPart>& parts) {
  std::vector<T> all;
  for (const ReceivedPart& part : parts) all.insert(all.end(), part.as<T>(), part.as<T>() + part.count<T>());
  return all;
}

Table distinct_rows(const Route& route, const Table& table) {
  return {table.name(), table.width(), static_cast<int64_t>(route.rows.size()), 0, {}};
}

// Fills `gathered` with the rows of a route.
void gather(Mesh& mesh, Table& table, const Route& route, Absent absent, IdRows* evicted, Table& gathered,
            int threads) {
  const size_t row_bytes = sizeof(float) * table.width();
  const std::vector<ReceivedPart> asked =
      mesh.exchange("ids of " + table.name(), route.parts(route.rows.data(), sizeof(int64_t)), route.problem);
  const std::vector<int64_t> ids = joined<int64_t>(asked);
  std::vector<float> rows(ids.size() * table.width());
  std::string problem;
  try {
    table.lookup(single(ids), absent, rows.data(), evicted, threads);
  } catch (const TableError& error) {
    problem = error.what();
  }
  std::vector<Part> answers;
  const char* next = reinterpret_cast<const char*>(rows.data());
  for (const ReceivedPart& part : asked) {
    answers.push_back({next, part.count<int64_t>() * row_bytes});
    next += answers.back().bytes;
  }
  const std::vector<ReceivedPart> found = mesh.exchange("rows of " + table.name(), answers, problem);
  char* to = reinterpret_cast<char*>(gathered.memory());
  for (const ReceivedPart& part : found) {
    if (part.bytes) memcpy(to, part.data.get(), part.bytes);
    to += part.bytes;
  }
}

}  // namespace

void lookup_by_ranks(Mesh& mesh, Table& table, const Placement& placement, const Bags& bags, Absent absent, float* out,
                     IdRows* evicted, int threads) {
  const std::unique_lock<std::mutex> lock = mesh.begin();
  const Route route = route_of(mesh, table, placement, bags, threads);
  Table gathered = distinct_rows(route, table);
  gather(mesh, table, route, absent, evicted, gathered, threads);
  gathered.lookup(at_places(route, bags), Absent::kZeros, out, nullptr, threads);
}

MergedRows merge_by_ranks(Mesh& mesh, const Table& table, const Placement& placement, const Bags& bags,
                          const float* grad, int threads) {
  const std::unique_lock<std::mutex> lock = mesh.begin();
  const Route route = route_of(mesh, table, placement, bags, threads);
  const int64_t width = table.width();
  std::vector<float> sums;
  if (route.problem.empty()) {
    const MergedRows merged = distinct_rows(route, table).merge(at_places(route, bags), grad, threads);
    std::vector<int64_t> places(merged.size());
    std::vector<float> values(merged.size() * width);
    merged.write(width, places.data(), values.data(), threads);
    sums.resize(route.rows.size() * width);
    for (size_t i = 0; i < places.size(); i++) {
      memcpy(&sums[places[i] * width], &values[i * width], sizeof(float) * width);
    }
  }
  const std::vector<int64_t> ids = joined<int64_t>(
      mesh.exchange("indices of " + table.name(), route.parts(route.rows.data(), sizeof(int64_t)), route.problem));
  const std::vector<float> all = joined<float>(
      mesh.exchange("gradients of " + table.name(), route.parts(sums.data(), sizeof(float) * width)));
  return table.merge(single(ids), all.data(), threads);
}

void weight_gradient_by_ranks(Mesh& mesh, Table& table, const Placement& placement, const Bags& bags,
                              const float* grad, float* out, int threads) {
  const std::unique_lock<std::mutex> lock = mesh.begin();
  const Route route = route_of(mesh, table, placement, bags, threads);
  Table gathered = distinct_rows(route, table);
  gather(mesh, table, route, Absent::kZeros, nullptr, gathered, threads);
  gathered.weight_gradient(at_places(route, bags), grad, out, threads);
}

}  // namespace terarec
