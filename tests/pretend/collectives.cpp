// Collectives of the pretended device: gloo's, on the same memory, ordered with streams as NCCL's are.
#include "pretend.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace pretend {

namespace {

using Stack = torch::jit::Stack;

// The stream on which a communicator's asynchronous collectives run, one after the other; and whether it is new.
std::pair<c10::Stream, bool> stream_of(const void* group, c10::Device device) {
  static std::mutex lock;
  static std::unordered_map<const void*, c10::Stream> streams;
  const std::lock_guard<std::mutex> guard(lock);
  auto found = streams.find(group);
  const bool fresh = found == streams.end() || found->second.device() != device;
  if (fresh) {
    const c10::impl::VirtualGuardImpl impl(kType);
    found = streams.insert_or_assign(group, impl.getNewStream(device)).first;
  }
  return {found->second, fresh};
}

// What gloo does in its own thread. Waiting for it is the host's, since streams here run at once.
class Flight final : public c10d::Work {
 public:
  Flight(c10::intrusive_ptr<c10d::Work> inner, c10::Stream stream, std::vector<at::Tensor> results)
      : inner_(std::move(inner)), stream_(stream), results_(std::move(results)), ended_(kType) {
    ended_.record(stream_);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner_->wait(timeout);
    ended_.block(current_stream(stream_.device()));
    return done;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  void abort() override {
    inner_->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::ofTensors(), std::vector<c10::Device>{stream_.device()});
    // Not by waiting here: gloo's thread may need the GIL, which the caller may hold.
    inner_->getFuture()->addCallback([future, stream = stream_, results = results_](c10::ivalue::Future& done) {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
        return;
      }
      const c10::StreamGuard guard(stream); // a future records events on the streams that are current
      future->markCompleted(c10::IValue(results));
    });
    return future;
  }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  c10::Stream stream_;
  std::vector<at::Tensor> results_;
  c10::Event ended_;
};

// `value` with every tensor as the CPU sees it; the tensors themselves go to `found`.
c10::IValue seen_by_cpu(const c10::IValue& value, std::vector<at::Tensor>& found) {
  if (value.isTensor()) {
    found.push_back(value.toTensor());
    return as_cpu(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      found.push_back(tensor);
      list.push_back(as_cpu(tensor));
    }
    return list;
  }
  if (!value.isList() || value.isIntList()) {
    return value;
  }
  c10::List<c10::List<at::Tensor>> lists;
  for (const c10::IValue& each : value.toListRef()) {
    lists.push_back(seen_by_cpu(each, found).toTensorList());
  }
  return lists;
}

// Takes an operator of torch's `c10d` library, whichever: all name what they write `output…` and what they read
// `input…`, or have one argument `tensors` for both.
void collective(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  const c10::IValue given = (*stack)[first];
  std::vector<at::Tensor> results, reads, writes;
  const void* group = nullptr;
  bool asynchronous = true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& place = (*stack)[first + i];
    const std::string& name = arguments[i].name();
    if (name == "process_group") {
      group = place.toObject()->getSlot(0).toCapsule().get();
    } else if (name == "async_op") {
      asynchronous = place.toBool();
    } else if (name.rfind("input", 0) == 0) {
      place = seen_by_cpu(place, reads);
    } else if (name.rfind("output", 0) == 0 || name.rfind("tensor", 0) == 0) {
      std::vector<at::Tensor> found;
      place = seen_by_cpu(place, found);
      results.insert(results.end(), found.begin(), found.end());
      if (schema.name() != "c10d::send") {
        writes.insert(writes.end(), found.begin(), found.end());
      }
      if (name[0] == 't' && schema.name() != "c10d::recv_") {
        reads.insert(reads.end(), found.begin(), found.end());
      }
    }
  }
  const std::vector<at::Tensor>& any = reads.empty() ? writes : reads;
  const c10::Device device = any.empty() ? current_device() : any[0].device();
  const c10::Stream current = current_stream(device);
  const auto [own, first_use] = stream_of(group, device);
  const c10::Stream stream = asynchronous ? own : current;
  if (asynchronous) {
    c10::Event queued(kType);
    queued.record(current);
    queued.block(stream);
  }
  const c10::StreamGuard guard(stream);
  op.callBoxed(stack);
  auto inner = stack->back().toCustomClass<c10d::Work>();
  if (first_use) {
    inner->wait(kNoTimeout); // NCCL makes the communicator now: until all its ranks come, the host goes no further
  }
  stack->back() = c10::IValue(
      c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<Flight>(std::move(inner), stream, std::move(results))));
  if (schema.returns().size() == 2) {
    (*stack)[stack->size() - 2] = given; // what the operator returns is its first argument
  }
}

} // namespace

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (const char* name :
       {"_allgather_base_",
        "_reduce_scatter_base_",
        "allgather_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "allreduce_",
        "allreduce_coalesced_",
        "alltoall_",
        "alltoall_base_",
        "barrier",
        "broadcast_",
        "gather_",
        "recv_",
        "recv_any_source_",
        "reduce_",
        "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_",
        "scatter_",
        "send"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
  }
}

} // namespace pretend
