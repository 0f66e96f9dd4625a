// SPDX-License-Identifier: Apache-2.0

// The ops of tables, which loading this library into a process with TensorFlow registers (`tf.load_op_library`).
//
// The first input is the handle of the variable that stands for a table: gradients and the order of ops in a function
// follow it. A kernel finds the table by the attribute `table`, its number in this process.

#include <array>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "tensorflow/c_api.h"
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
    int64_t bytes = type == kFloat ? 4 : 8;
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
  int64_t table = 0, pooling = 0, inserts = 0, change = 0, rule = 0;
};

constexpr struct {
  const char* name;
  int64_t Attributes::* value;
} kAttributes[] = {{"table", &Attributes::table}, {"pooling", &Attributes::pooling}, {"inserts", &Attributes::inserts},
                   {"change", &Attributes::change}, {"rule", &Attributes::rule}};

struct Op {
  const char* name;
  std::vector<const char*> inputs, outputs, attributes;
  void (*compute)(const Attributes&, TF_OpKernelContext*);
};

// The bags of inputs `first`, `first` + 1 and `first` + 2: ids, offsets and weights, of which the last may be empty.
struct BagInputs {
  BagInputs(TF_OpKernelContext* context, int first, int64_t pooling)
      : ids(context, first), offsets(context, first + 1), weights(context, first + 2),
        pooling(static_cast<Pooling>(pooling)) {
    ids.check("ids", {-1});
    if (this->pooling != Pooling::kNone) offsets.check("row_splits", {-1});
    if (this->pooling != Pooling::kNone && offsets.size() == 0) {
      throw TableError(TableError::kInvalid, "row_splits: got no number, expected one more than there are rows");
    }
    if (weights.size() > 0) weights.check("weights", {ids.size()});
  }

  Bags plain() const {
    return {ids.as<int64_t>(), ids.size(), offsets.as<int64_t>(), offsets.size() - 1,
            weights.size() > 0 ? weights.as<float>() : nullptr, pooling};
  }

  Input ids, offsets, weights;
  Pooling pooling;
};

void look_up(const Attributes& of, TF_OpKernelContext* context) {
  const std::shared_ptr<Table> table = table_of(of.table);
  const BagInputs inputs(context, 1, of.pooling);
  const Bags bags = inputs.plain();
  const Output out(context, 0, kFloat, {bags.results(), table->width()});
  table->lookup(bags, of.inserts != 0, out.as<float>(), table_threads());
}

void merge(const Attributes& of, TF_OpKernelContext* context) {
  const std::shared_ptr<Table> table = table_of(of.table);
  const BagInputs inputs(context, 1, of.pooling);
  const Bags bags = inputs.plain();
  const Input grad(context, 4);
  grad.check("grad", {bags.results(), table->width()});
  const MergedRows merged = table->merge(bags, grad.as<float>(), table_threads());
  const Output ids(context, 0, kInt64, {merged.size()}), sums(context, 1, kFloat, {merged.size(), table->width()});
  merged.write(table->width(), ids.as<int64_t>(), sums.as<float>(), table_threads());
}

void weight_gradient(const Attributes& of, TF_OpKernelContext* context) {
  const std::shared_ptr<Table> table = table_of(of.table);
  const BagInputs inputs(context, 1, of.pooling);
  const Bags bags = inputs.plain();
  const Input grad(context, 4);
  grad.check("grad", {bags.results(), table->width()});
  const Output out(context, 0, kFloat, {bags.num_ids});
  if (bags.weights) table->weight_gradient(bags, grad.as<float>(), out.as<float>(), table_threads());
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
  table->read(0, rows, ids.as<int64_t>(), values.as<float>(), nullptr);
}

void size(const Attributes& of, TF_OpKernelContext* context) {
  const std::shared_ptr<Table> table = table_of(of.table);
  const Output out(context, 0, kInt64, {2});
  out.as<int64_t>()[0] = table->size();
  out.as<int64_t>()[1] = table->width();
}

constexpr const char* kHandle = "variable: resource";
constexpr int kOps = 7;

const std::array<Op, kOps>& ops() {
  static const std::array<Op, kOps> all{{
      {"TerarecLookup",
       {kHandle, "ids: int64", "row_splits: int64", "weights: float"},
       {"vectors: float"},
       {"table: int", "pooling: int", "inserts: int"},
       &look_up},
      {"TerarecMerge",
       {kHandle, "ids: int64", "row_splits: int64", "weights: float", "grad: float"},
       {"indices: int64", "values: float"},
       {"table: int", "pooling: int"},
       &merge},
      {"TerarecWeightGradient",
       {kHandle, "ids: int64", "row_splits: int64", "weights: float", "grad: float"},
       {"gradient: float"},
       {"table: int", "pooling: int"},
       &weight_gradient},
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
