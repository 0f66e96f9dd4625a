// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <string_view>
#include <variant>
#include <vector>

#include "encoding/bindings.h"
#include "encoding/fields.h"
#include "encoding/id_tables.h"
#include "encoding/python_arrays.h"

namespace terarec::encoding {
namespace {

template <typename Table, typename Id>
void find_masked(const Table& table, Vector<const typename Table::Value> keys, Maybe<const uint8_t> valid,
                 Vector<Id> ids) {
  const int64_t rows = length(keys);
  require(length(ids) == rows, "the arrays differ in length");
  const MissingMask mask = mask_of(valid, rows);
  nb::gil_scoped_release release;
  table.find_all(keys.data(), mask, rows, ids.data());
}

// Writes the ids of keys[s] in tables[s] to row s of `ids`, in one call: a thread that released the GIL for each column
// would wait for it as often.
template <typename Table>
void find_columns(const std::vector<const Table*>& tables, const std::vector<Vector<const typename Table::Value>>& keys,
                  const std::vector<Maybe<const uint8_t>>& valid, Matrix<int32_t> ids) {
  require(keys.size() == tables.size() && valid.size() == tables.size() && ids.shape(0) == tables.size(),
          "expected one array, one mask and one row of ids a table");
  const auto rows = static_cast<int64_t>(ids.shape(1));
  std::vector<MissingMask> masks;
  for (size_t column = 0; column < tables.size(); ++column) {
    require(length(keys[column]) == rows, "the arrays differ in length");
    masks.push_back(mask_of(valid[column], rows));
  }
  nb::gil_scoped_release release;
  for (size_t column = 0; column < tables.size(); ++column) {
    int32_t* row = ids.data() + static_cast<int64_t>(column) * rows;
    tables[column]->find_all(keys[column].data(), masks[column], rows, row);
  }
}

// Returns the id of a text; sets `good` to false for a text that is invalid for the table's type.
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
                Maybe<const uint8_t> valid, Vector<Id> ids) {
  require(length(offsets) == length(ids) + 1, "expected one more offset than ids");
  const MissingMask mask = mask_of(valid, length(ids));
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
int64_t find_objects(const Table& table, nb::list values, int64_t* ids) {
  int64_t row = 0;
  for (nb::handle value : values) {
    prefetch_object(values.ptr(), row + kObjectsAhead);
    bool good = true;
    ids[row] = value.is_none() ? kMissingId : id_of_object(table, value.ptr(), good);
    if (!good) return row;
    ++row;
  }
  return -1;
}

template <typename Table>
int64_t find_list(const Table& table, nb::list values, Vector<int64_t> ids) {
  require(nb::len(values) == ids.shape(0), "values and ids differ in length");
  return find_objects(table, values, ids.data());
}

// Tables of several columns, whose values are looked up in one call. It holds the Python objects that own the tables.
class TablesOfColumns {
 public:
  explicit TablesOfColumns(nb::list tables) : owners_(tables) {
    for (nb::handle table : tables) tables_.push_back(nb::cast<Table>(table));
  }

  // Writes the ids of c lists of Python values, one list for each table, one after another; returns the first position in
  // `ids` with an invalid value, or -1.
  int64_t find_lists(nb::list columns, Vector<int64_t> ids) const {
    require(nb::len(columns) == tables_.size(), "columns and tables differ in number");
    int64_t begin = 0;
    for (size_t column = 0; column < tables_.size(); ++column) {
      nb::list values = nb::cast<nb::list>(columns[column]);
      const int64_t end = begin + static_cast<int64_t>(nb::len(values));
      require(end <= length(ids), "values and ids differ in length");
      const int64_t row = std::visit([&](auto* table) { return find_objects(*table, values, ids.data() + begin); },
                                     tables_[column]);
      if (row >= 0) return begin + row;
      begin = end;
    }
    require(begin == length(ids), "values and ids differ in length");
    return -1;
  }

 private:
  using Table = std::variant<const Hex32Ids*, const Int64Ids*, const TextIds*>;
  nb::list owners_;
  std::vector<Table> tables_;
};

template <typename Table>
nb::class_<Table> bind_integer_ids(nb::module_& module, const char* name) {
  using Value = typename Table::Value;
  return nb::class_<Table>(module, name)
      .def("__init__",
           [](Table* self, Vector<const Value> values, int64_t hash_buckets) {
             new (self) Table(values.data(), length(values), hash_buckets);
           },
           nb::arg("values"), nb::arg("hash_buckets"))
      .def("find_all", &find_masked<Table, int32_t>, nb::arg("keys"), nb::arg("valid").none(),
           nb::arg("ids").noconvert())
      .def("find_all", &find_masked<Table, int64_t>, nb::arg("keys"), nb::arg("valid").none(),
           nb::arg("ids").noconvert())
      .def("find_list", &find_list<Table>, nb::arg("values"), nb::arg("ids").noconvert());
}

}  // namespace

void bind_ids(nb::module_& module) {
  bind_integer_ids<Int64Ids>(module, "Int64Ids");
  bind_integer_ids<Hex32Ids>(module, "Hex32Ids");
  module.def("find_columns", &find_columns<Int64Ids>, nb::arg("tables"), nb::arg("keys"), nb::arg("valid"),
             nb::arg("ids").noconvert());
  module.def("find_columns", &find_columns<Hex32Ids>, nb::arg("tables"), nb::arg("keys"), nb::arg("valid"),
             nb::arg("ids").noconvert());
  nb::class_<TextIds>(module, "TextIds")
      .def("__init__",
           [](TextIds* self, Vector<const uint8_t> text, Vector<const int64_t> offsets, int64_t hash_buckets) {
             const Texts texts(text, offsets);
             new (self) TextIds(texts.data, texts.offsets, texts.size, hash_buckets);
           },
           nb::arg("text"), nb::arg("offsets"), nb::arg("hash_buckets"))
      .def("find_all", &find_texts<int32_t>, nb::arg("text"), nb::arg("offsets"), nb::arg("valid").none(),
           nb::arg("ids").noconvert())
      .def("find_all", &find_texts<int64_t>, nb::arg("text"), nb::arg("offsets"), nb::arg("valid").none(),
           nb::arg("ids").noconvert())
      .def("find_list", &find_list<TextIds>, nb::arg("values"), nb::arg("ids").noconvert());
  nb::class_<TablesOfColumns>(module, "TablesOfColumns")
      .def(nb::init<nb::list>(), nb::arg("tables"))
      .def("find_lists", &TablesOfColumns::find_lists, nb::arg("columns"), nb::arg("ids").noconvert());
}

}  // namespace terarec::encoding
