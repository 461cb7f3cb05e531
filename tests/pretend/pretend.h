// What device.cpp and operators.cpp share.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <vector>

namespace pretend {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;

c10::Device current_device();
c10::Stream current_stream(c10::Device device);
c10::Allocator* allocator();

// Memory that `storage`, a CPU one, has allocated, as memory of `device`.
c10::DataPtr adopt(c10::Storage storage, c10::Device device);

// `tensor`'s memory as a tensor of the CPU's.
at::Tensor as_cpu(const at::Tensor& tensor);

// Keeps what both sizes have; shared by Storage.resize_ and by operators that resize.
void resize(c10::StorageImpl* storage, size_t bytes);

} // namespace pretend
