// A device that is the CPU's memory under another name: torch takes every path that it takes for an accelerator, with
// streams, events, device threads of autograd and hooks of its allocator. Whatever is queued has ended when the call
// returns. Includes little, since headers of torch are what compiling takes its time for.
#include "pretend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

namespace pretend {

namespace {

std::atomic<int64_t> last_stream{0};
thread_local c10::DeviceIndex device_of_thread = 0;
thread_local c10::StreamId streams_of_thread[kDevices] = {};

} // namespace

c10::Device current_device() {
  return c10::Device(kType, device_of_thread);
}

c10::Stream current_stream(c10::Device device) {
  const c10::DeviceIndex index = device.index() < 0 ? device_of_thread : device.index();
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), streams_of_thread[index]);
}

// -- memory -----------------------------------------------------------------------------------------------------------

namespace {

struct Block {
  void* address;
  size_t bytes;
  c10::Stream stream; // that was current when the memory was made
  c10::Storage adopted; // whoever frees the memory, if not this block
};

void free_block(void* context) {
  Block* block = static_cast<Block*>(context);
  if (!block->adopted) {
    std::free(block->address);
  }
  delete block;
}

c10::DataPtr own(void* address, size_t bytes, c10::Device device, c10::Storage adopted) {
  const c10::Stream stream = current_stream(device);
  return {address, new Block{address, bytes, stream, std::move(adopted)}, &free_block, device};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device = current_device();
    if (bytes == 0) {
      return {nullptr, device};
    }
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 64, bytes) == 0, "pretend: out of memory, ", bytes, " bytes asked for");
    std::memset(address, 0xff, bytes); // NaN in every floating-point dtype: nobody computes with what nobody wrote
    return own(address, bytes, device, {});
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

Allocator the_allocator;

// Host memory that copies may leave and reach while the host goes on.
struct PinnedAllocator final : c10::Allocator {
  static std::mutex& lock() {
    static std::mutex mutex;
    return mutex;
  }
  static std::unordered_set<const void*>& known() {
    static std::unordered_set<const void*> addresses;
    return addresses;
  }
  static void free(void* address) {
    {
      const std::lock_guard<std::mutex> guard(lock());
      known().erase(address);
    }
    std::free(address);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 64, std::max<size_t>(bytes, 1)) == 0, "pretend: out of memory");
    const std::lock_guard<std::mutex> guard(lock());
    known().insert(address);
    return {address, address, &free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

PinnedAllocator the_pinned_allocator;

} // namespace

c10::Allocator* allocator() {
  return &the_allocator;
}

c10::DataPtr adopt(c10::Storage storage, c10::Device device) {
  void* address = storage.mutable_data();
  const size_t bytes = storage.nbytes();
  return own(address, bytes, device, std::move(storage));
}

void resize(c10::StorageImpl* storage, size_t bytes) {
  const c10::Device device = storage->device();
  const c10::DeviceIndex before = device_of_thread;
  device_of_thread = device.index();
  c10::DataPtr data = the_allocator.allocate(bytes);
  device_of_thread = before;
  if (const size_t kept = std::min(bytes, storage->nbytes())) {
    std::memcpy(data.get(), storage->data_ptr().get(), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

// -- streams and events -----------------------------------------------------------------------------------------------

namespace {

struct Recorded {
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = current_device();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return current_device();
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "pretend: there is no device ", device);
    device_of_thread = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_of_thread = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : current_device());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : current_device(), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool urgent) const override {
    return getNewStream(device, urgent ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device());
    streams_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Recorded{};
    }
    Recorded* recorded = static_cast<Recorded*>(*event);
    recorded->time = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void* event, c10::DeviceIndex index) const noexcept override {
    if (event != nullptr) {
      delete static_cast<Recorded*>(event);
    }
  }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "pretend: both events must have been recorded");
    const auto passed = static_cast<Recorded*>(second)->time - static_cast<Recorded*>(first)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    Guard().setDevice(c10::Device(kType, index));
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return device_of_thread;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice(c10::Device(kType, index)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return current_device();
  }
  bool isPinnedPtr(const void* address) const override {
    const std::lock_guard<std::mutex> guard(PinnedAllocator::lock());
    return PinnedAllocator::known().count(address) != 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &the_pinned_allocator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize(storage.unsafeGetStorageImpl(), bytes);
  }
};

struct Registration {
  Registration() {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
};

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kType, &the_allocator)
static const Registration registration;

} // namespace pretend

extern "C" int64_t pretend_device_count() {
  return pretend::kDevices;
}
