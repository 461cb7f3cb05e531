// Operators of the pretended device: memory and copies here, everything else by the CPU's kernels on the same memory.
// All kernels are boxed: one function for every operator, and few templates to compile.
#include "pretend.h"

#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <unordered_map>
#include <vector>

namespace pretend {

namespace {

const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

size_t span(const at::Tensor& tensor) {
  size_t last = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) {
      return 0;
    }
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return last * tensor.itemsize();
}

at::Tensor tensor_like(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// One call's tensors as the CPU sees them. Tensors of one storage share one here as well.
class Alias {
 public:
  at::Tensor cpu(const at::Tensor& tensor) {
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    const size_t needed = span(tensor);
    TORCH_CHECK(
        needed == 0 || tensor.storage_offset() * tensor.itemsize() + needed <= storage->nbytes(),
        "pretend: a tensor of ", tensor.sizes(), " is used whose memory of ", storage->nbytes(), " bytes is too small or freed");
    auto found = storages_.find(storage);
    if (found == storages_.end()) {
      auto* kept = new c10::Storage(tensor.storage());
      c10::DataPtr data(
          storage->mutable_data(),
          kept,
          [](void* context) { delete static_cast<c10::Storage*>(context); },
          c10::Device(c10::DeviceType::CPU));
      c10::Storage made(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data), c10::GetAllocator(c10::DeviceType::CPU), true);
      sources_.emplace(made.unsafeGetStorageImpl(), tensor);
      found = storages_.emplace(storage, std::move(made)).first;
    }
    at::Tensor made = tensor_like(found->second, kCpuKeys, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return made;
  }

  // A result of the CPU's kernel: a view of an argument, or memory that the kernel made.
  at::Tensor back(const at::Tensor& result, c10::Device device) {
    if (!result.defined() || result.device().type() != c10::DeviceType::CPU || !result.has_storage()) {
      return result;
    }
    const auto source = sources_.find(result.storage().unsafeGetStorageImpl());
    if (source != sources_.end()) {
      return tensor_like(source->second.storage(), kKeys, result);
    }
    const size_t bytes = result.storage().nbytes();
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, adopt(result.storage(), device), allocator(), true);
    return tensor_like(std::move(storage), kKeys, result);
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::StorageImpl*, at::Tensor> sources_; // any tensor of the pretended storage
};

std::vector<int64_t> integers(const c10::IValue& value) {
  std::vector<int64_t> found;
  if (value.isIntList()) {
    return value.toIntVector();
  }
  for (const c10::SymInt& each : value.toSymIntVector()) {
    found.push_back(each.guard_int(__FILE__, __LINE__));
  }
  return found;
}

int64_t integer(const c10::IValue& value) {
  return value.toSymInt().guard_int(__FILE__, __LINE__);
}

c10::Device device_of(const c10::IValue& value) {
  const c10::Device device = value.isNone() ? current_device() : value.toDevice();
  return device.has_index() ? device : current_device();
}

struct OnDevice {
  explicit OnDevice(c10::Device device) : guard(device) {}
  c10::DeviceGuard guard;
};

using Stack = torch::jit::Stack;

// -- memory -----------------------------------------------------------------------------------------------------------

void empty(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 6); // size, dtype, layout, device, pin_memory, memory_format
  const OnDevice on(device_of(arguments[3]));
  const auto dtype = arguments[1].toOptional<c10::ScalarType>().value_or(c10::get_default_dtype_as_scalartype());
  std::optional<c10::MemoryFormat> format;
  if (!arguments[5].isNone()) {
    format = arguments[5].toMemoryFormat();
  }
  at::Tensor made = at::detail::empty_generic(integers(arguments[0]), allocator(), kKeys, dtype, format);
  torch::jit::push(*stack, std::move(made));
}

void empty_strided(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 6); // size, stride, dtype, layout, device, pin_memory
  const OnDevice on(device_of(arguments[4]));
  const auto dtype = arguments[2].toOptional<c10::ScalarType>().value_or(c10::get_default_dtype_as_scalartype());
  at::Tensor made =
      at::detail::empty_strided_generic(integers(arguments[0]), integers(arguments[1]), allocator(), kKeys, dtype);
  torch::jit::push(*stack, std::move(made));
}

void resize_to(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides, offset);
  const size_t bytes = span(tensor);
  const size_t needed = bytes ? offset * tensor.itemsize() + bytes : 0;
  if (needed > tensor.storage().nbytes()) {
    resize(tensor.storage().unsafeGetStorageImpl(), needed);
  }
}

void resize_(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 3); // self, size, memory_format
  const at::Tensor self = arguments[0].toTensor();
  const std::vector<int64_t> sizes = integers(arguments[1]);
  if (self.sizes() != c10::IntArrayRef(sizes)) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t d = sizes.size(); d-- > 1;) {
      strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
    }
    resize_to(self, sizes, strides, self.storage_offset());
  }
  torch::jit::push(*stack, self);
}

void set_storage(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 5); // self, source, offset, size, stride
  const at::Tensor self = arguments[0].toTensor();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(arguments[1].toStorage());
  resize_to(self, integers(arguments[3]), integers(arguments[4]), integer(arguments[2]));
  torch::jit::push(*stack, self);
}

void set_whole_storage(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 2); // self, source
  const at::Tensor self = arguments[0].toTensor();
  const c10::Storage source = arguments[1].toStorage();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  const std::vector<int64_t> sizes{static_cast<int64_t>(source.nbytes() / self.itemsize())}, strides{1};
  resize_to(self, sizes, strides, 0);
  torch::jit::push(*stack, self);
}

void set_tensor(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 2); // self, source
  const at::Tensor self = arguments[0].toTensor(), source = arguments[1].toTensor();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  torch::jit::push(*stack, self);
}

// Between any two of the host and the devices. The host waits as it would for CUDA: unless its memory is pinned.
void copy(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 3); // source, target, non_blocking
  const at::Tensor source = arguments[0].toTensor(), target = arguments[1].toTensor();
  Alias alias;
  (here(target) ? alias.cpu(target) : target).copy_(here(source) ? alias.cpu(source) : source);
  torch::jit::push(*stack, target);
}

void record_stream(const c10::OperatorHandle&, Stack* stack) {
  torch::jit::pop(*stack, 2); // self, stream
}

void number(const c10::OperatorHandle&, Stack* stack) {
  const at::Tensor self = torch::jit::pop(*stack).toTensor();
  Alias alias;
  torch::jit::push(*stack, alias.cpu(self).item());
}

void boxed_as_cpu(const c10::OperatorHandle&, Stack* stack) {
  torch::jit::push(*stack, pretend::as_cpu(torch::jit::pop(*stack).toTensor()));
}

// -- everything else --------------------------------------------------------------------------------------------------

bool same_alias(const c10::AliasInfo* a, const c10::AliasInfo* b) {
  return a != nullptr && b != nullptr && a->isWrite() && b->isWrite() && a->beforeSets() == b->beforeSets();
}

void by_the_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  Alias alias;
  std::optional<c10::Device> device;
  std::vector<std::pair<at::Tensor, at::Tensor>> written; // of the device, and as the CPU sees it

  const auto taken = [&](const at::Tensor& tensor, bool write) {
    if (!here(tensor)) {
      return tensor;
    }
    device = device.value_or(tensor.device());
    at::Tensor seen = alias.cpu(tensor);
    if (write) {
      written.emplace_back(tensor, seen);
    }
    return seen;
  };

  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = given[i];
    c10::IValue& place = (*stack)[stack->size() - count + i];
    const c10::AliasInfo* info = schema.arguments()[i].alias_info();
    const bool write = info != nullptr && info->isWrite();
    if (value.isTensor()) {
      place = taken(value.toTensor(), write);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(taken(tensor, write));
      }
      place = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<at::Tensor>(taken(*tensor, write)) : std::nullopt);
      }
      place = std::move(list);
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      device = device.value_or(device_of(value));
      place = c10::Device(c10::DeviceType::CPU);
    }
  }
  const c10::Device on = device.value_or(current_device());

  op.callBoxed(stack);

  for (auto& [tensor, seen] : written) { // what the kernel has resized
    if (tensor.sizes() != seen.sizes() || tensor.strides() != seen.strides()) {
      resize_to(tensor, seen.sizes(), seen.strides(), seen.storage_offset());
      if (seen.const_data_ptr() != tensor.const_data_ptr() && span(seen)) {
        std::memcpy(tensor.mutable_data_ptr(), seen.const_data_ptr(), span(seen));
      }
    }
  }
  const size_t results = schema.returns().size();
  for (size_t i = 0; i < results; ++i) {
    c10::IValue& place = (*stack)[stack->size() - results + i];
    const c10::AliasInfo* info = schema.returns()[i].alias_info();
    if (place.isTensor()) {
      at::Tensor result;
      for (size_t j = 0; j < count && !result.defined(); ++j) {
        if (same_alias(info, schema.arguments()[j].alias_info()) && given[j].isTensor()) {
          result = given[j].toTensor();
        }
      }
      if (!result.defined()) {
        result = alias.back(place.toTensor(), on);
      }
      place = result;
    } else if (place.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& seen : place.toTensorVector()) {
        list.push_back(alias.back(seen, on));
      }
      place = std::move(list);
    }
  }
}

template <c10::BoxedKernel::BoxedKernelFunction* function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

} // namespace

at::Tensor as_cpu(const at::Tensor& tensor) {
  Alias alias;
  return here(tensor) ? alias.cpu(tensor) : tensor;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(boxed<&by_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", boxed<&empty>());
  m.impl("empty_strided", boxed<&empty_strided>());
  m.impl("resize_", boxed<&resize_>());
  m.impl("set_.source_Storage_storage_offset", boxed<&set_storage>());
  m.impl("set_.source_Storage", boxed<&set_whole_storage>());
  m.impl("set_.source_Tensor", boxed<&set_tensor>());
  m.impl("_copy_from", boxed<&copy>());
  m.impl("record_stream", boxed<&record_stream>());
  m.impl("_local_scalar_dense", boxed<&number>());
  // These the CPU computes in one kernel and any other device by several operators, to other bits.
  for (const char* name :
       {"_stack",
        "addr",
        "mish_backward",
        "native_channel_shuffle",
        "native_group_norm",
        "native_layer_norm",
        "silu_backward"}) {
    m.impl(name, boxed<&by_the_cpu>());
  }
}

TORCH_LIBRARY(pretend, m) {
  m.def("as_cpu(Tensor(a) self) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(pretend, PrivateUse1, m) {
  m.impl("as_cpu", boxed<&boxed_as_cpu>());
}

TORCH_LIBRARY_IMPL(pretend, CPU, m) {
  m.impl("as_cpu", boxed<&boxed_as_cpu>());
}

} // namespace pretend
