// SPDX-License-Identifier: Apache-2.0

// The ops of tables, which loading this library into a process with TensorFlow registers (`tf.load_op_library`).
//
// The first input is the handle of the variable that stands for a table: gradients and the order of ops in a function
// follow it. A kernel finds the table by the attribute `table`, its number in this process.

#include <algorithm>
#include <array>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "tensorflow/c_api.h"
#include "tensorflow/rank_tables.h"
#include "tensorflow/rule_numbers.h"
#include "tensorflow/tables.h"

namespace terarec::tensorflow {
namespace {

const CApi& tf() { return *c_api(); }

class Status {
 public:
  Status() : status_(tf().new_status()) {}
  ~Status() { tf().delete_status(status_); }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;

  operator TF_Status*() const { return status_; }
  bool ok() const { return tf().code(status_) == kOk; }
  void set(Code code, const char* message) const { tf().set_status(status_, code, message); }
  void check() const {
    if (!ok()) throw TableError(TableError::kInvalid, tf().message(status_));
  }

 private:
  TF_Status* const status_;
};

class Input {
 public:
  Input(TF_OpKernelContext* context, int index) {
    const Status status;
    tf().input(context, index, &tensor_, status);
    status.check();
  }
  ~Input() { tf().delete_tensor(tensor_); }
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;

  template <class T>
  const T* as() const { return static_cast<const T*>(tf().data(tensor_)); }
  int64_t size() const { return tf().element_count(tensor_); }

  // Throws unless the tensor has this shape; -1 stands for any size.
  void check(const char* name, std::initializer_list<int64_t> shape) const {
    bool fits = tf().num_dims(tensor_) == static_cast<int>(shape.size());
    std::string got, expected;
    int axis = 0;
    for (const int64_t size : shape) {
      if (fits && size >= 0 && tf().dim(tensor_, axis) != size) fits = false;
      expected += (axis++ ? ", " : "") + (size < 0 ? std::string("n") : std::to_string(size));
    }
    if (fits) return;
    for (int i = 0; i < tf().num_dims(tensor_); i++) got += (i ? ", " : "") + std::to_string(tf().dim(tensor_, i));
    throw TableError(TableError::kInvalid,
                     std::string(name) + ": got shape [" + got + "], expected [" + expected + "]");
  }

 private:
  TF_Tensor* tensor_ = nullptr;
};

class Output {
 public:
  Output(TF_OpKernelContext* context, int index, DataType type, const std::vector<int64_t>& shape) {
    int64_t bytes = type == kUInt8 ? 1 : type == kFloat ? 4 : 8;
    for (const int64_t size : shape) bytes *= size;
    const Status status;
    tensor_ = tf().allocate_output(context, index, type, shape.data(), static_cast<int>(shape.size()), bytes, status);
    status.check();
  }
  ~Output() { tf().delete_tensor(tensor_); }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  template <class T>
  T* as() const { return static_cast<T*>(tf().data(tensor_)); }

 private:
  TF_Tensor* tensor_;
};

// The attributes of all ops; each op has some of them.
struct Attributes {
  int64_t table = 0, pooling = 0, weighted = 0, absent = 0, change = 0, rule = 0;
  int64_t home = Placement::kHere, all_rows = -1;

  Placement placement() const { return {home, all_rows}; }
};

constexpr struct {
  const char* name;
  int64_t Attributes::* value;
} kAttributes[] = {{"table", &Attributes::table},       {"pooling", &Attributes::pooling},
                   {"weighted", &Attributes::weighted}, {"absent", &Attributes::absent},
                   {"change", &Attributes::change},     {"rule", &Attributes::rule},
                   {"home", &Attributes::home},         {"all_rows", &Attributes::all_rows}};

struct Op {
  const char* name;
  std::vector<const char*> inputs, outputs, attributes;
  void (*compute)(const Attributes&, TF_OpKernelContext*);
};

// The bags of inputs `first`, `first` + 1 and `first` + 2: ids, offsets and weights.
struct BagInputs {
  BagInputs(TF_OpKernelContext* context, int first, const Attributes& of)
      : ids(context, first), offsets(context, first + 1), weights(context, first + 2),
        pooling(static_cast<Pooling>(of.pooling)) {
    ids.check("ids", {-1});
    if (pooling != Pooling::kNone) offsets.check("row_splits", {-1});
    if (pooling != Pooling::kNone && offsets.size() == 0) {
      throw TableError(TableError::kInvalid, "row_splits: got no number, expected one more than there are rows");
    }
    weights.check("weights", {of.weighted ? ids.size() : 0});
  }

  Bags plain() const {
    return {ids.as<int64_t>(), ids.size(), offsets.as<int64_t>(), offsets.size() - 1,
            weights.size() > 0 ? weights.as<float>() : nullptr, pooling};
  }

  Input ids, offsets, weights;
  Pooling pooling;
};

// The mesh that a table needs; null for one of a process alone.
std::shared_ptr<Mesh> mesh_of(const Attributes& of) {
  if (of.home == Placement::kHere) return nullptr;
  std::shared_ptr<Mesh> mesh = mesh_of_process();
  if (!mesh) throw TableError(TableError::kGone, "ranks: this process has left them");
  return mesh;
}

// The inputs of a lookup, which follow the handles of the variable and of the order of exchanges.
struct LookupCall {
  LookupCall(const Attributes& of, TF_OpKernelContext* context)
      : table(table_of(of.table)), mesh(mesh_of(of)), inputs(context, 2, of), bags(inputs.plain()) {}

  const std::shared_ptr<Table> table;
  const std::shared_ptr<Mesh> mesh;
  const BagInputs inputs;
  const Bags bags;
};

void look_up(const Attributes& of, TF_OpKernelContext* context) {
  const LookupCall call(of, context);
  const int64_t width = call.table->width();
  const Output out(context, 0, kFloat, {call.bags.results(), width});
  const Absent absent = static_cast<Absent>(of.absent);
  IdRows evicted;
  if (call.mesh) {
    lookup_by_ranks(*call.mesh, *call.table, of.placement(), call.bags, absent, out.as<float>(), &evicted,
                    table_threads());
  } else {
    call.table->lookup(call.bags, absent, out.as<float>(), &evicted, table_threads());
  }
  const int64_t count = static_cast<int64_t>(evicted.ids.size());
  const Output ids(context, 1, kInt64, {count}), rows(context, 2, kFloat, {count, width});
  std::copy(evicted.ids.begin(), evicted.ids.end(), ids.as<int64_t>());
  std::copy(evicted.rows.begin(), evicted.rows.end(), rows.as<float>());
}

void merge(const Attributes& of, TF_OpKernelContext* context) {
  const LookupCall call(of, context);
  const int64_t width = call.table->width();
  const Input grad(context, 5);
  grad.check("grad", {call.bags.results(), width});
  const MergedRows merged =
      call.mesh ? merge_by_ranks(*call.mesh, *call.table, of.placement(), call.bags, grad.as<float>(), table_threads())
                : call.table->merge(call.bags, grad.as<float>(), table_threads());
  const Output ids(context, 0, kInt64, {merged.size()}), sums(context, 1, kFloat, {merged.size(), width});
  merged.write(width, ids.as<int64_t>(), sums.as<float>(), table_threads());
}

void weight_gradient(const Attributes& of, TF_OpKernelContext* context) {
  const LookupCall call(of, context);
  const Input grad(context, 5);
  grad.check("grad", {call.bags.results(), call.table->width()});
  const Output out(context, 0, kFloat, {call.bags.num_ids});
  if (call.mesh) {
    weight_gradient_by_ranks(*call.mesh, *call.table, of.placement(), call.bags, grad.as<float>(), out.as<float>(),
                             table_threads());
  } else {
    call.table->weight_gradient(call.bags, grad.as<float>(), out.as<float>(), table_threads());
  }
}

// The bytes of all ranks, one after the other, and how many come from each.
void gather(const Attributes&, TF_OpKernelContext* context) {
  const std::shared_ptr<Mesh> mesh = mesh_of_process();
  if (!mesh) throw TableError(TableError::kGone, "ranks: this process has left them");
  const Input bytes(context, 1);
  const std::vector<Part> parts(mesh->size(), Part{bytes.as<char>(), static_cast<size_t>(bytes.size())});
  const std::unique_lock<std::mutex> lock = mesh->begin();
  const std::vector<ReceivedPart> received = mesh->exchange("a tensor", parts);
  int64_t total = 0;
  const Output sizes(context, 0, kInt64, {mesh->size()});
  for (int r = 0; r < mesh->size(); r++) total += sizes.as<int64_t>()[r] = received[r].count<char>();
  const Output all(context, 1, kUInt8, {total});
  char* to = all.as<char>();
  for (const ReceivedPart& part : received) to = std::copy_n(part.data.get(), part.bytes, to);
}

void apply(const Attributes& of, TF_OpKernelContext* context) {
  const std::shared_ptr<Table> table = table_of(of.table);
  const Input ids(context, 1), grads(context, 2), numbers(context, 3), step(context, 4);
  ids.check("indices", {-1});
  grads.check("values", {ids.size(), table->width()});
  numbers.check("numbers", {kRuleNumbers});
  step.check("step", {});
  const RowRule rule = rule_of(of.rule, numbers.as<double>());
  table->apply(rule, *step.as<int64_t>(), ids.as<int64_t>(), ids.size(), grads.as<float>(), table_threads());
}

void change(const Attributes& of, TF_OpKernelContext* context) {
  const std::shared_ptr<Table> table = table_of(of.table);
  const Input ids(context, 1), values(context, 2);
  ids.check("indices", {-1});
  values.check("values", {ids.size(), table->width()});
  table->change(static_cast<Table::Change>(of.change), ids.as<int64_t>(), ids.size(), values.as<float>(),
                table_threads());
}

void read(const Attributes& of, TF_OpKernelContext* context) {
  const std::shared_ptr<Table> table = table_of(of.table);
  const int64_t rows = table->size();
  const Output ids(context, 0, kInt64, {rows}), values(context, 1, kFloat, {rows, table->width()});
  table->read(0, rows, ids.as<int64_t>(), values.as<float>(), nullptr, nullptr);
}

void size(const Attributes& of, TF_OpKernelContext* context) {
  const std::shared_ptr<Table> table = table_of(of.table);
  const Output out(context, 0, kInt64, {2});
  out.as<int64_t>()[0] = table->size();
  out.as<int64_t>()[1] = table->width();
}

constexpr const char* kHandle = "variable: resource";
// What keeps the exchanges of ranks in one order: the same in all ops that exchange.
constexpr const char* kOrder = "order: resource";
constexpr int kOps = 8;

const std::array<Op, kOps>& ops() {
  static const std::array<Op, kOps> all{{
      {"TerarecLookup",
       {kHandle, kOrder, "ids: int64", "row_splits: int64", "weights: float"},
       {"vectors: float", "evicted_ids: int64", "evicted_rows: float"},
       {"table: int", "pooling: int", "weighted: int", "absent: int", "home: int", "all_rows: int"},
       &look_up},
      {"TerarecMerge",
       {kHandle, kOrder, "ids: int64", "row_splits: int64", "weights: float", "grad: float"},
       {"indices: int64", "values: float"},
       {"table: int", "pooling: int", "weighted: int", "home: int", "all_rows: int"},
       &merge},
      {"TerarecWeightGradient",
       {kHandle, kOrder, "ids: int64", "row_splits: int64", "weights: float", "grad: float"},
       {"gradient: float"},
       {"table: int", "pooling: int", "weighted: int", "home: int", "all_rows: int"},
       &weight_gradient},
      {"TerarecGather", {kOrder, "bytes: uint8"}, {"sizes: int64", "all: uint8"}, {}, &gather},
      {"TerarecApply",
       {kHandle, "indices: int64", "values: float", "numbers: double", "step: int64"},
       {},
       {"table: int", "rule: int"},
       &apply},
      {"TerarecChange", {kHandle, "indices: int64", "values: float"}, {}, {"table: int", "change: int"}, &change},
      {"TerarecRead", {kHandle}, {"indices: int64", "values: float"}, {"table: int"}, &read},
      {"TerarecSize", {kHandle}, {"size: int64"}, {"table: int"}, &size},
  }};
  return all;
}

// One kernel of an op, made for each node of a graph.
template <int kOp>
struct Kernel {
  static void* create(TF_OpKernelConstruction* construction) {
    Attributes* const attributes = new Attributes;
    for (const char* spec : ops()[kOp].attributes) {
      const std::string name = std::string(spec).substr(0, std::string(spec).find(':'));
      for (const auto& known : kAttributes) {
        if (name != known.name) continue;
        const Status status;
        tf().attr_int64(construction, known.name, &(attributes->*known.value), status);
        if (!status.ok()) tf().construction_failure(construction, status);
      }
    }
    return attributes;
  }

  // Exceptions end here: TensorFlow's code knows none.
  static void compute(void* kernel, TF_OpKernelContext* context) {
    Code code = kInternal;
    std::string problem;
    try {
      ops()[kOp].compute(*static_cast<Attributes*>(kernel), context);
      return;
    } catch (const TableError& error) {
      code = error.kind == TableError::kInvalid ? kInvalidArgument
             : error.kind == TableError::kGone  ? kFailedPrecondition
                                                : kResourceExhausted;
      problem = error.what();
    } catch (const std::bad_alloc&) {
      code = kResourceExhausted;
      problem = "the system has too little memory";
    } catch (const std::exception& error) {
      problem = error.what();
    }
    const Status status;
    status.set(code, problem.c_str());
    tf().failure(context, status);
  }

  static void destroy(void* kernel) { delete static_cast<Attributes*>(kernel); }
};

void unknown_shape(TF_ShapeInferenceContext* context, TF_Status* status) { tf().set_unknown_shape(context, status); }

void register_op(const Op& op) {
  TF_OpDefinitionBuilder* const builder = tf().new_op(op.name);
  for (const char* spec : op.inputs) tf().add_input(builder, spec);
  for (const char* spec : op.outputs) tf().add_output(builder, spec);
  for (const char* spec : op.attributes) tf().add_attr(builder, spec);
  tf().set_is_stateful(builder, true);
  tf().set_shape_function(builder, &unknown_shape);
  tf().register_op(builder, Status());
}

template <int kOp>
void register_from() {
  if constexpr (kOp < kOps) {
    const Op& op = ops()[kOp];
    register_op(op);
    tf().register_kernel(op.name,
                         tf().new_kernel(op.name, "CPU", &Kernel<kOp>::create, &Kernel<kOp>::compute,
                                         &Kernel<kOp>::destroy),
                         Status());
    register_from<kOp + 1>();
  }
}

// TensorFlow collects the ops that the loading of a library registers.
const bool is_registered = [] {
  if (c_api()) register_from<0>();
  return c_api() != nullptr;
}();

}  // namespace
}  // namespace terarec::tensorflow
