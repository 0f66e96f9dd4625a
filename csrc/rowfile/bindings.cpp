// SPDX-License-Identifier: Apache-2.0

// The Python bindings of the row file. Arrays were checked by terarec.memory.row_file; every call releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "common/platform.h"
#include "rowfile/crc32c.h"
#include "rowfile/row_file.h"

namespace nb = nanobind;
using namespace terarec::rowfile;

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;
// Arrays that a call writes to are bound with noconvert(): a converted copy would take the result.
using Keys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using KeysOut = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;
using RowsOutArray = nb::ndarray<uint8_t, nb::ndim<2>, nb::device::cpu>;
using Found = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Io io_of(const std::string& name) {
  return name == "io_uring" ? Io::kUring : name == "threads" ? Io::kThreads : Io::kAuto;
}

RowsOut span(RowsOutArray& rows) { return {reinterpret_cast<char*>(rows.data()), rows.stride(0)}; }

// Store i has keys ends[i - 1] to ends[i].
void read_rows(const std::vector<RowFile*>& stores, Keys keys, const std::vector<int64_t>& ends, RowsOutArray out,
               Found found) {
  const RowsOut rows = span(out);
  std::vector<RowFile::Request> requests;
  int64_t first = 0;
  for (size_t i = 0; i < stores.size(); i++) {
    const RowsOut part{rows.rows + first * rows.stride, rows.stride};
    requests.push_back({stores[i], keys.data() + first, ends[i] - first, part, found.data() + first});
    first = ends[i];
  }
  nb::gil_scoped_release unlocked;
  RowFile::read(requests);
}

void write_rows(RowFile& store, Keys keys, Rows rows) {
  const auto count = static_cast<int64_t>(keys.shape(0));
  const RowsIn span{reinterpret_cast<const char*>(rows.data()), rows.stride(0)};
  nb::gil_scoped_release unlocked;
  store.write(keys.data(), count, span);
}

void erase_keys(RowFile& store, Keys keys) {
  const auto count = static_cast<int64_t>(keys.shape(0));
  nb::gil_scoped_release unlocked;
  store.erase(keys.data(), count);
}

int64_t next_rows(Scan& scan, KeysOut keys, RowsOutArray out) {
  const auto most = static_cast<int64_t>(keys.shape(0));
  const RowsOut rows = span(out);
  nb::gil_scoped_release unlocked;
  return scan.next(keys.data(), rows, most);
}

// (message, file, page, number of the system's error), which terarec.memory.row_file converts to its errors.
void translate(const std::exception_ptr& thrown, void* type) {
  try {
    std::rethrow_exception(thrown);
  } catch (const DamagedError& error) {
    PyErr_SetObject(static_cast<PyObject*>(type),
                    nb::make_tuple(error.what(), error.file(), error.page(), error.code()).ptr());
  } catch (const StoreError& error) {
    PyErr_SetObject(static_cast<PyObject*>(type), nb::make_tuple(error.what(), "", -1, error.code()).ptr());
  }
}

}  // namespace

NB_MODULE(_rowfile, m) {
  nb::set_leak_warnings(false);  // as in _embedding: others may keep objects until the interpreter is gone
  m.doc() = "The row file, to be called by terarec.memory.row_file alone.";
  nb::object error = nb::steal(PyErr_NewException("terarec.kernels.cpu._rowfile.Error", PyExc_RuntimeError, nullptr));
  m.attr("Error") = error;
  nb::register_exception_translator(&translate, error.ptr());

  m.def("crc32c", [](nb::bytes data) { return crc32c(data.c_str(), data.size()); });
  m.def("crc32c_by_tables", [](nb::bytes data) { return crc32c_by_tables(data.c_str(), data.size()); });
  // For memory that rows have given up, of which indexes here take as much.
  m.def("discard", [](uintptr_t memory, size_t begin, size_t end) {
    terarec::discard_memory(reinterpret_cast<void*>(memory), begin, end);
  });
  m.def("create", &RowFile::create, Unlocked());
  m.def("clone", &RowFile::clone, Unlocked(), nb::arg("source"), nb::arg("directory"), nb::arg("layout"));

  nb::class_<Layout>(m, "Layout")
      .def(nb::init<int64_t, int64_t, int64_t>(), nb::arg("row_bytes"), nb::arg("page_bytes"), nb::arg("segment_pages"))
      .def_ro("page_rows", &Layout::page_rows);

  nb::class_<PageFetcher>(m, "PageFetcher")
      .def(
          "__init__",
          [](PageFetcher* self, const std::string& io, int threads, bool direct, int64_t most_bytes) {
            new (self) PageFetcher(io_of(io), threads, direct, most_bytes);
          },
          nb::arg("io"), nb::arg("threads"), nb::arg("direct"), nb::arg("most_bytes"))
      .def("uses_uring", &PageFetcher::uses_uring)
      .def("memory_bytes", &PageFetcher::memory_bytes, Unlocked());

  nb::class_<RowFile>(m, "RowFile")
      .def(
          "__init__",
          [](RowFile* self, std::string directory, const Layout& layout, std::shared_ptr<PageFetcher> fetcher,
             bool read_only, bool direct, int64_t queue_bytes, int64_t open_files, double space_ratio,
             bool is_working) {
            RowFileOptions options;
            options.read_only = read_only;
            options.direct = direct;
            options.queue_bytes = queue_bytes;
            options.open_files = open_files;
            options.space_ratio = space_ratio;
            options.is_working = is_working;
            nb::gil_scoped_release unlocked;
            new (self) RowFile(std::move(directory), layout, std::move(fetcher), options);
          },
          nb::arg("directory"), nb::arg("layout"), nb::arg("fetcher"), nb::arg("read_only"), nb::arg("direct"),
          nb::arg("queue_bytes"), nb::arg("open_files"), nb::arg("space_ratio"), nb::arg("is_working"))
      .def("size", &RowFile::size, Unlocked())
      .def("file_bytes", &RowFile::file_bytes, Unlocked())
      .def("memory_bytes", &RowFile::memory_bytes, Unlocked())
      .def("index_bytes", &RowFile::index_bytes, Unlocked())
      .def("written_bytes", &RowFile::written_bytes, Unlocked())
      .def("num_segments", &RowFile::num_segments, Unlocked())
      .def("last_commit", &RowFile::last_commit, Unlocked())
      .def("metadata", &RowFile::metadata, Unlocked())
      .def("write", &write_rows)
      .def("erase", &erase_keys)
      .def("commit", &RowFile::commit, Unlocked())
      .def("seal", &RowFile::seal, Unlocked())
      .def("snapshot", &RowFile::snapshot, Unlocked())
      .def("refresh", &RowFile::refresh, Unlocked())
      .def("compact", &RowFile::compact, Unlocked())
      .def("close", &RowFile::close, Unlocked());

  m.def("read", &read_rows, nb::arg("stores"), nb::arg("keys"), nb::arg("ends"), nb::arg("out").noconvert(),
        nb::arg("found").noconvert());

  nb::class_<Scan>(m, "Scan")
      .def("__init__",
           [](Scan* self, RowFile& store) {
             nb::gil_scoped_release unlocked;
             new (self) Scan(store);
           },
           nb::keep_alive<1, 2>())
      .def("next", &next_rows, nb::arg("keys").noconvert(), nb::arg("out").noconvert());
}
