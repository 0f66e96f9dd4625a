#include <string_view>

#include "encoding/bind_tables.h"
#include "encoding/hex.h"
#include "encoding/id_tables.h"
#include "encoding/numpy_arrays.h"
#include "encoding/python_values.h"

namespace terarec::encoding {
namespace {

template <typename Table, typename Id>
void find_masked(const Table& table, Vector<const typename Table::Value> keys, Maybe<const bool> missing,
                 Vector<Id> ids) {
  const int64_t rows = length(keys);
  require(length(ids) == rows, "the arrays differ in length");
  const MissingMask mask = mask_of(missing, rows);
  nb::gil_scoped_release release;
  find_all(table, keys.data(), mask, rows, ids.data());
}

// The id of a text, sets `good` to false for one that the table's type refuses.
int64_t id_of(const TextIds& table, std::string_view value, bool&) {
  return value.empty() ? kMissingId : table.find(value);
}

int64_t id_of(const Hex32Ids& table, std::string_view value, bool& good) {
  if (value.empty()) return kMissingId;
  uint32_t key = 0;
  good = parse_hex(value.data(), value.data() + value.size(), key);
  return good ? table.find(key) : kMissingId;
}

template <typename Id>
void find_texts(const TextIds& table, Vector<const uint8_t> text, Vector<const int64_t> offsets,
                Maybe<const bool> missing, Vector<Id> ids) {
  require(length(offsets) == length(ids) + 1, "expected one more offset than ids");
  const MissingMask mask = mask_of(missing, length(ids));
  nb::gil_scoped_release release;
  const Texts texts(text, offsets);
  table.find_all(texts.data, texts.offsets, mask, texts.size, ids.data());
}

template <typename Table>
int64_t id_of_object(const Table& table, PyObject* value, bool& good) {
  const auto text = text_of_object(value);
  good = text.has_value();
  return good ? id_of(table, *text, good) : kMissingId;
}

int64_t id_of_object(const Int64Ids& table, PyObject* value, bool& good) {
  const auto key = integer_of_object(value);
  good = key.has_value();
  return good ? table.find(*key) : kMissingId;
}

// Ids of a list of Python values, None being missing; returns the first row of another type or range, or -1.
template <typename Table>
int64_t find_list(const Table& table, nb::list values, Vector<int64_t> ids) {
  require(nb::len(values) == ids.shape(0), "values and ids differ in length");
  int64_t row = 0;
  for (nb::handle value : values) {
    bool good = true;
    ids.data()[row] = value.is_none() ? kMissingId : id_of_object(table, value.ptr(), good);
    if (!good) return row;
    ++row;
  }
  return -1;
}

template <typename Table>
nb::class_<Table> bind_integer_ids(nb::module_& module, const char* name) {
  using Value = typename Table::Value;
  return nb::class_<Table>(module, name)
      .def("__init__",
           [](Table* self, Vector<const Value> values, int64_t hash_buckets) {
             new (self) Table(values.data(), length(values), hash_buckets);
           },
           nb::arg("values"), nb::arg("hash_buckets"))
      .def("find_all", &find_masked<Table, int32_t>, nb::arg("keys"), nb::arg("missing").none(), nb::arg("ids"))
      .def("find_all", &find_masked<Table, int64_t>, nb::arg("keys"), nb::arg("missing").none(), nb::arg("ids"))
      .def("find_list", &find_list<Table>, nb::arg("values"), nb::arg("ids"));
}

}  // namespace

void bind_ids(nb::module_& module) {
  bind_integer_ids<Int64Ids>(module, "Int64Ids");
  bind_integer_ids<Hex32Ids>(module, "Hex32Ids");
  nb::class_<TextIds>(module, "TextIds")
      .def("__init__",
           [](TextIds* self, Vector<const uint8_t> text, Vector<const int64_t> offsets, int64_t hash_buckets) {
             const Texts texts(text, offsets);
             new (self) TextIds(texts.data, texts.offsets, texts.size, hash_buckets);
           },
           nb::arg("text"), nb::arg("offsets"), nb::arg("hash_buckets"))
      .def("find_all", &find_texts<int32_t>, nb::arg("text"), nb::arg("offsets"), nb::arg("missing").none(),
           nb::arg("ids"))
      .def("find_all", &find_texts<int64_t>, nb::arg("text"), nb::arg("offsets"), nb::arg("missing").none(),
           nb::arg("ids"))
      .def("find_list", &find_list<TextIds>, nb::arg("values"), nb::arg("ids"));
}

}  // namespace terarec::encoding
