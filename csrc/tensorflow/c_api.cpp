// SPDX-License-Identifier: Apache-2.0
#include "tensorflow/c_api.h"

#include <dlfcn.h>

namespace terarec::tensorflow {
namespace {

constexpr const char* kLibraries[] = {"libtensorflow_framework.so.2", "libtensorflow_cc.so.2",
                                      "libtensorflow_framework.2.dylib", "libtensorflow_cc.2.dylib"};

// Only what is loaded already: a process without TensorFlow must not get it from elsewhere.
void* find(const char* name) {
  for (const char* library : kLibraries) {
    void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) continue;
    void* const function = dlsym(handle, name);
    dlclose(handle);  // the count of references alone: the library stays
    if (function) return function;
  }
  return nullptr;
}

template <class Function>
bool bind(Function*& to, const char* name) {
  to = reinterpret_cast<Function*>(find(name));
  return to != nullptr;
}

bool bind_all(CApi& api) {
  return bind(api.new_status, "TF_NewStatus") && bind(api.delete_status, "TF_DeleteStatus") &&
         bind(api.set_status, "TF_SetStatus") && bind(api.code, "TF_GetCode") && bind(api.message, "TF_Message") &&
         bind(api.new_op, "TF_NewOpDefinitionBuilder") && bind(api.add_attr, "TF_OpDefinitionBuilderAddAttr") &&
         bind(api.add_input, "TF_OpDefinitionBuilderAddInput") &&
         bind(api.add_output, "TF_OpDefinitionBuilderAddOutput") &&
         bind(api.set_is_stateful, "TF_OpDefinitionBuilderSetIsStateful") &&
         bind(api.set_shape_function, "TF_OpDefinitionBuilderSetShapeInferenceFunction") &&
         bind(api.set_unknown_shape, "TF_ShapeInferenceContextSetUnknownShape") &&
         bind(api.register_op, "TF_RegisterOpDefinition") && bind(api.new_kernel, "TF_NewKernelBuilder") &&
         bind(api.register_kernel, "TF_RegisterKernelBuilder") &&
         bind(api.attr_int64, "TF_OpKernelConstruction_GetAttrInt64") &&
         bind(api.construction_failure, "TF_OpKernelConstruction_Failure") && bind(api.input, "TF_GetInput") &&
         bind(api.allocate_output, "TF_AllocateOutput") && bind(api.failure, "TF_OpKernelContext_Failure") &&
         bind(api.data, "TF_TensorData") && bind(api.num_dims, "TF_NumDims") && bind(api.dim, "TF_Dim") &&
         bind(api.element_count, "TF_TensorElementCount") && bind(api.delete_tensor, "TF_DeleteTensor");
}

}  // namespace

const CApi* c_api() {
  static CApi api;
  static const bool is_bound = bind_all(api);
  return is_bound ? &api : nullptr;
}

}  // namespace terarec::tensorflow
