// What device.cpp and operators.cpp share.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

namespace pretend {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;

// What the listener is told; listener.py has the same numbers.
enum Event : int64_t {
  kStreamCreated = 0, // device, stream, priority
  kRecordEvent = 1, // device, stream, event
  kWaitEvent = 2, // device, stream, event
  kSynchronizeEvent = 3, // device, 0, event
  kSynchronizeStream = 4, // device, stream
  kSynchronizeDevice = 5, // device
  kAllocated = 6, // device, stream, address, bytes
  kFreed = 7, // device, stream, address, bytes; the stream is the one that the memory was made on
  kRecordStream = 8, // device, stream, address, bytes
  kDestroyEvent = 9, // device, 0, event
};

// Set from Python through ctypes, whose callbacks take the GIL; null when nobody listens.
using Report = void (*)(int64_t event, int64_t device, int64_t stream, int64_t a, int64_t b);

void report(Event event, c10::Device device, c10::StreamId stream, int64_t a = 0, int64_t b = 0);

c10::Device current_device();
c10::Stream current_stream(c10::Device device);
c10::Allocator* allocator();

// Memory that `storage`, a CPU one, has allocated, as memory of `device`.
c10::DataPtr adopt(c10::Storage storage, c10::Device device);

// `tensor`'s memory as a tensor of the CPU's.
at::Tensor as_cpu(const at::Tensor& tensor);

// Tells the listener of operators what `op` reads and writes on the current stream.
void launched(const std::string& op, c10::Device device, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes);

// Keeps what both sizes have; shared by Storage.resize_ and by operators that resize.
void resize(c10::StorageImpl* storage, size_t bytes);

} // namespace pretend
