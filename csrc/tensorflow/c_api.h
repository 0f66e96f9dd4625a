// SPDX-License-Identifier: Apache-2.0

// The functions of TensorFlow's C API that ops are registered with and run by, declared here and found in the process:
// one build serves every release, and nothing links against TensorFlow. Since 2.15 they have not changed.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
}

namespace terarec::tensorflow {

// Of tensorflow/c/tf_status.h and tf_datatype.h.
enum Code : int { kOk = 0, kInvalidArgument = 3, kResourceExhausted = 8, kFailedPrecondition = 9, kInternal = 13 };
enum DataType : int { kFloat = 1, kUInt8 = 4, kInt64 = 9 };

struct CApi {
  TF_Status* (*new_status)();
  void (*delete_status)(TF_Status*);
  void (*set_status)(TF_Status*, Code, const char*);
  Code (*code)(const TF_Status*);
  const char* (*message)(const TF_Status*);

  TF_OpDefinitionBuilder* (*new_op)(const char* name);
  void (*add_attr)(TF_OpDefinitionBuilder*, const char* spec);
  void (*add_input)(TF_OpDefinitionBuilder*, const char* spec);
  void (*add_output)(TF_OpDefinitionBuilder*, const char* spec);
  void (*set_is_stateful)(TF_OpDefinitionBuilder*, bool);
  void (*set_shape_function)(TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*));
  void (*set_unknown_shape)(TF_ShapeInferenceContext*, TF_Status*);
  void (*register_op)(TF_OpDefinitionBuilder*, TF_Status*);

  TF_KernelBuilder* (*new_kernel)(const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),
                                  void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*));
  void (*register_kernel)(const char* name, TF_KernelBuilder*, TF_Status*);
  void (*attr_int64)(TF_OpKernelConstruction*, const char* name, int64_t*, TF_Status*);
  void (*construction_failure)(TF_OpKernelConstruction*, TF_Status*);

  void (*input)(TF_OpKernelContext*, int index, TF_Tensor**, TF_Status*);
  TF_Tensor* (*allocate_output)(TF_OpKernelContext*, int index, DataType, const int64_t* dims, int num_dims,
                                size_t bytes, TF_Status*);
  void (*failure)(TF_OpKernelContext*, TF_Status*);

  void* (*data)(const TF_Tensor*);
  int (*num_dims)(const TF_Tensor*);
  int64_t (*dim)(const TF_Tensor*, int);
  int64_t (*element_count)(const TF_Tensor*);
  void (*delete_tensor)(TF_Tensor*);
};

// Null if no TensorFlow with these functions is loaded in this process.
const CApi* c_api();

}  // namespace terarec::tensorflow
