// Four simulated "cuda" devices for any build of torch.
//
// In a CUDA build, they take the place of torch's own. torch asks for the hooks once, while it is
// imported, so this library is loaded before: its hooks have a higher priority. `sim_install` is
// called after the import, and replaces what torch has registered by then.
//
// A device's memory is host memory, and its operations run at once with the CPU's kernels. What the
// host may see of them is as late as CUDA permits: a copy without waiting lands when its target is
// used or when the host waits, memory holds NaN before it is written and after it is freed, and each
// wait of the host is counted. A stream must wait for the copies of another one before it uses them.
// Memory that another stream used may be freed only after `record_stream`, or once the stream that
// allocated it has waited for an event behind that use: CUDA reuses it in the order of that stream.
// With `sim_watch_uses`, a stream must also wait for what kernels of others have done to a block.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

namespace {

constexpr int MAX_DEVICES = 4;
constexpr int GARBAGE = 0xFF;  // NaN in every floating-point type
constexpr size_t ALIGNMENT = 512;

// A copy between pinned and device memory that the host has not waited for.
struct Copy {
  int64_t number;
  DeviceIndex device;
  c10::StreamId stream;
  at::Tensor target, source;  // as seen by the host; they keep the memory alive
  at::Tensor value;           // of the source when the copy was enqueued
  bool landed;
};

std::recursive_mutex mutex;
int visible = MAX_DEVICES;
thread_local DeviceIndex current = 0;
thread_local c10::StreamId current_streams[MAX_DEVICES] = {};
thread_local std::string latched;  // an error that the runtime returned: the next kernel has it, too
thread_local int inside = 0;  // of a kernel: its own copies are no waits
std::vector<Copy> copies;
int64_t work = 0;  // the number of the last copy, use or event, in all streams
std::vector<std::string> waits;
bool stuck = false;
std::string failure;
std::map<const char*, size_t> pinned;       // start and size
std::map<const char*, size_t> blocks;       // device memory
std::map<const char*, std::set<c10::StreamId>> allowed;  // streams that may use a block
std::map<const char*, c10::StreamId> made_on;  // the stream that allocated a block
// streams that used it, and those that wrote it, with the numbers of the last times
std::map<const char*, std::map<c10::StreamId, int64_t>> used_on, written_on;
bool is_watching = false;  // whether a stream has to wait for what others have written
using StreamKey = std::pair<DeviceIndex, c10::StreamId>;
using Clock = std::map<StreamKey, int64_t>;
std::map<StreamKey, Clock> waited;  // up to which work of others a stream has waited
std::map<int64_t, Clock> events;  // up to which work each stream is before an event, by its number
std::map<const char*, int> in_flight;       // used by collectives, by start of the block
std::set<void*> freed_in_flight;
size_t pinned_bytes = 0;                    // as reserved: powers of two, like CUDA's allocator
std::map<const char*, DeviceIndex> device_of;  // device memory
size_t used_bytes[MAX_DEVICES] = {}, peak_bytes[MAX_DEVICES] = {};
int64_t peer_copies = 0;                    // from one device to another
DeviceIndex capturing = -1;                 // the device with a stream that is captured
c10::StreamId captured_stream = -1;
std::thread::id capturing_thread;
int sync_debug_mode = 0;                    // 1: a kernel that waits warns

struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};

template <class Map>
auto containing(Map& map, const void* pointer) {
  auto next = map.upper_bound(static_cast<const char*>(pointer));
  if (next == map.begin()) return map.end();
  auto found = std::prev(next);
  return static_cast<const char*>(pointer) < found->first + found->second ? found : map.end();
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return containing(pinned, pointer) != pinned.end();
}

// A tensor of the host in the memory of a tensor of a device.
at::Tensor host(const at::Tensor& t) {
  if (t.is_cpu()) return t;
  auto keep = t.storage();
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [keep](void*) {},
                       t.options().device(at::kCPU).requires_grad(false));
}

void land(Copy& copy) {
  if (!copy.landed) {
    Inside guard;
    copy.target.copy_(copy.source);
    copy.landed = true;
  }
}

bool same_bytes(const at::Tensor& left, const at::Tensor& right) {
  auto a = left.contiguous(), b = right.contiguous();
  return std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

// Whether what a stream does next comes after some work of another one of its device.
bool comes_after(DeviceIndex device, c10::StreamId stream, c10::StreamId other, int64_t number) {
  return stream == other || waited[{device, stream}][{device, other}] >= number;
}

// Complete the copies up to a number of a device, or of a stream; the host has waited for them.
void complete(DeviceIndex device, int64_t up_to, std::optional<c10::StreamId> stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Inside guard;
  bool changed = false;
  for (auto copy = copies.begin(); copy != copies.end();) {
    bool is_awaited = !stream || comes_after(device, *stream, copy->stream, copy->number);
    if (copy->device != device || copy->number > up_to || !is_awaited) {
      ++copy;
      continue;
    }
    if (copy->landed) changed |= !same_bytes(copy->source, copy->value);
    land(*copy);
    copy = copies.erase(copy);
  }
  TORCH_CHECK(!changed, "pinned memory was written before a copy from it was complete");
}

bool is_capturing(DeviceIndex device) {
  return device == capturing && current_streams[device] == captured_stream;
}

// The current stream of a device uses a block. Returns whether it comes after what other streams
// have written there and, if it writes, after what they have read.
bool note_use(const void* pointer, DeviceIndex device, bool writes) {
  auto block = containing(blocks, pointer);
  if (block == blocks.end()) return true;
  c10::StreamId stream = current_streams[device];
  bool is_ordered = true;
  for (auto [other, number] : writes ? used_on[block->first] : written_on[block->first])
    is_ordered &= comes_after(device, stream, other, number);
  used_on[block->first][stream] = ++work;
  if (writes) written_on[block->first][stream] = work;
  return is_ordered || !is_watching;
}
constexpr const char* UNORDERED = "a stream did not wait for another one that used the same memory";

// A kernel uses a tensor: what is being copied into it has to be there. One without elements has an
// address, but kernels skip it.
void use(const at::Tensor& t, bool writes = false) {
  if (inside || !t.defined() || !t.is_cuda() || t.numel() == 0) return;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  c10::StreamId stream = current_streams[t.device().index()];
  for (auto& copy : copies)
    if (!copy.landed && copy.target.storage().data() == t.storage().data()) {
      TORCH_CHECK(comes_after(copy.device, stream, copy.stream, copy.number),
                  "a stream used a tensor without waiting for its copy");
      land(copy);
    }
  if (is_capturing(t.device().index())) return;  // it only runs in replays
  TORCH_CHECK(note_use(t.storage().data(), t.device().index(), writes), UNORDERED);
}

void block_while_stuck() {
  while (stuck) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

// The host waits for a device.
void wait_for(DeviceIndex device, const std::string& reason, int64_t up_to = INT64_MAX,
              std::optional<c10::StreamId> stream = std::nullopt) {
  if (inside) return;
  TORCH_CHECK(device != capturing || std::this_thread::get_id() != capturing_thread,
              "CUDA error: operation not permitted when stream is capturing");
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    waits.push_back(reason + " on cuda:" + std::to_string(device));
  }
  block_while_stuck();
  complete(device, up_to, stream);
  TORCH_CHECK(failure.empty(), failure);
}

// A kernel waits for its device.
void wait_in_kernel(DeviceIndex device, const std::string& reason) {
  TORCH_CHECK(inside || !is_capturing(device),
              "CUDA error: operation not permitted when stream is capturing");
  if (!inside && sync_debug_mode) TORCH_WARN("called a synchronizing CUDA operation");
  wait_for(device, reason, INT64_MAX, current_streams[device]);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Device device(DeviceType::CUDA, current);
    if (size == 0) return {nullptr, nullptr, &release, device};
    size_t rounded = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void* pointer = std::aligned_alloc(ALIGNMENT, rounded);
    std::memset(pointer, GARBAGE, rounded);
    std::lock_guard<std::recursive_mutex> lock(mutex);
    blocks[static_cast<char*>(pointer)] = rounded;
    allowed[static_cast<char*>(pointer)] = {current_streams[current]};
    made_on[static_cast<char*>(pointer)] = current_streams[current];
    // a graph replays in any stream
    if (is_capturing(current)) allowed[static_cast<char*>(pointer)].insert(0);
    device_of[static_cast<char*>(pointer)] = current;
    peak_bytes[current] = std::max(peak_bytes[current], used_bytes[current] += rounded);
    return {pointer, pointer, &release, device};
  }
  static void release(void* pointer) {
    if (!pointer) return;
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto block = blocks.find(static_cast<char*>(pointer));
    std::memset(pointer, GARBAGE, block->second);  // as if another tensor used it
    used_bytes[device_of[block->first]] -= block->second;
    for (auto [stream, number] : used_on[block->first])
      if (!allowed[block->first].count(stream) &&
          !comes_after(device_of[block->first], made_on[block->first], stream, number))
        failure = "memory was freed while a stream used it that was not recorded";
    used_on.erase(block->first);
    written_on.erase(block->first);
    allowed.erase(block->first);
    if (in_flight.count(block->first)) {
      freed_in_flight.insert(pointer);
      return;
    }
    blocks.erase(block);
    std::free(pointer);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};
DeviceAllocator device_allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    size_t reserved = ALIGNMENT;
    while (reserved < size) reserved *= 2;
    void* pointer = std::aligned_alloc(ALIGNMENT, reserved);
    std::lock_guard<std::recursive_mutex> lock(mutex);
    pinned[static_cast<char*>(pointer)] = reserved;
    pinned_bytes += reserved;
    return {pointer, pointer, &release, Device(DeviceType::CPU)};
  }
  static void release(void* pointer) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto found = pinned.find(static_cast<char*>(pointer));
    pinned_bytes -= found->second;
    pinned.erase(found);
    std::free(pointer);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};
PinnedAllocator pinned_allocator;

at::Generator& generator_of(DeviceIndex device) {
  static std::vector<at::Generator>* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int n = 0; n < MAX_DEVICES; ++n) made->push_back(at::detail::createCPUGenerator());
    return made;
  }();
  return (*all)[device < 0 ? current : device];
}

// Lets a kernel of the CPU draw from the generator of a device.
struct DrawFrom {
  explicit DrawFrom(DeviceIndex device)
      : lock(mutex), own(generator_of(device)), cpu(at::detail::getDefaultCPUGenerator()),
        before(cpu.get_state()) {
    cpu.set_state(own.get_state());
  }
  ~DrawFrom() {
    own.set_state(cpu.get_state());
    cpu.set_state(before);
  }
  std::lock_guard<std::recursive_mutex> lock;
  at::Generator& own;
  at::Generator cpu;
  at::Tensor before;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before(DeviceType::CUDA, current);
    current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override {
    DeviceIndex index = device.index() < 0 ? current : device.index();
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    DeviceIndex index = device.index() < 0 ? current : device.index();
    return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, index));
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return MAX_DEVICES; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return !stuck; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return !stuck; }
  void synchronizeStream(const Stream& stream) const override {
    wait_for(stream.device_index(), "stream", INT64_MAX, stream.id());
  }
  void synchronizeDevice(const DeviceIndex device) const override { wait_for(device, "device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

}  // namespace

struct SimulatedHooks final : at::CUDAHooksInterface {
  SimulatedHooks() = default;
  explicit SimulatedHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return visible; }
  int getNumGPUs() const override { return visible; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return generator_of(device);
  }
  // The first new generator of a device is its default one, for torch.cuda.default_generators.
  at::Generator getNewGenerator(DeviceIndex device) const override {
    static std::set<DeviceIndex>* taken = new std::set<DeviceIndex>;
    return taken->insert(device).second ? generator_of(device) : at::detail::createCPUGenerator();
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED,
                                       SimulatedHooks)

namespace {

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator, KEYS, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator, KEYS,
                                           c10::dtype_or_default(dtype));
}

bool goes_at_once(const at::Tensor& left, const at::Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() &&
         left.is_contiguous() && right.is_contiguous();
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  auto to = host(self), from = host(source.detach());
  if (inside || (self.is_cuda() && source.is_cuda())) {
    use(self, true);
    use(source);
    Inside guard;
    if (self.is_cuda() && source.is_cuda() && self.device() != source.device()) ++peer_copies;
    to.copy_(from);
    return self;
  }
  DeviceIndex device = self.is_cuda() ? self.device().index() : source.device().index();
  const at::Tensor& ours = self.is_cuda() ? source : self;
  if (non_blocking && is_pinned(ours.data_ptr()) && goes_at_once(self, source)) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    use(self, true);
    use(source);
    Inside guard;
    auto value = from.clone();
    if (self.is_cpu()) {
      from = value;  // later kernels may change the device's memory
      std::memset(self.data_ptr(), GARBAGE, self.nbytes());
    }
    copies.push_back({++work, device, current_streams[device], to, from, value, false});
    return self;
  }
  wait_in_kernel(device, self.is_cuda() ? "copy to device" : "copy to host");
  use(self, true);
  use(source);
  Inside guard;
  to.copy_(from);
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto to = target;
  return copy_(to, source, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  auto to = target;
  to.resize_(source.sizes());
  return copy_(to, source, false);
}

void foreach_copy_(at::TensorList self, at::TensorList sources, bool non_blocking) {
  for (size_t n = 0; n < self.size(); ++n) {
    auto to = self[n];
    copy_(to, sources[n], non_blocking);
  }
}

at::Scalar item(const at::Tensor& t) {
  wait_in_kernel(t.device().index(), "item");
  use(t);
  return host(t).item();
}

at::Tensor strided(const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride,
                                                    offset.value_or(t.storage_offset()));
  return view;
}

at::Tensor reshape_alias(const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride) {
  return strided(t, size, stride, std::nullopt);
}

at::Tensor view(const at::Tensor& t, at::IntArrayRef size) {
  auto like = host(t).view(size);
  return strided(t, like.sizes(), like.strides(), std::nullopt);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset,
                        at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t size = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {size}, {});
}

const at::Tensor& resize_(const at::Tensor& t, at::IntArrayRef size,
                          std::optional<at::MemoryFormat>) {
  if (t.sizes() == size) return t;  // a view keeps its strides, for operations in place
  size_t elements = t.storage_offset();
  elements += c10::multiply_integers(size);
  size_t nbytes = elements * t.itemsize();
  if (t.storage().nbytes() < nbytes) {
    c10::DeviceGuard on(t.device());
    auto before = t.storage().nbytes();
    auto memory = device_allocator.allocate(nbytes);
    if (before) std::memcpy(memory.get(), t.storage().data(), before);
    t.storage().set_data_ptr_noswap(std::move(memory));
    t.storage().set_nbytes(nbytes);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}

void record_stream(at::Tensor& t, Stream stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto block = containing(blocks, t.storage().data());
  if (block != blocks.end()) allowed[block->first].insert(stream.id());
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name().substr(schema.name().find("::") + 2);
  const bool indexes = starts_with(name, "index") || starts_with(name, "_index_put");
  std::optional<Device> device;
  bool waits_here = op.hasTag(at::Tag::data_dependent_output) ||
                    (op.hasTag(at::Tag::dynamic_output_shape) && !indexes);
  auto check = [&](const at::Tensor& t, bool writes) {
    if (!t.defined()) return;
    use(t, writes);
    if (t.is_cpu() && t.dim() > 0 && indexes) {
      waits_here = true;  // it is copied to the device
      return;
    }
    if (t.is_cpu() && t.dim() == 0) return;
    if (!device) device = t.device();
    TORCH_CHECK(*device == t.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", t.device(), "! (in ", name, ")");
    if (t.is_cuda()) device = t.device();
  };
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  for (size_t n = 0; n < arguments.size(); ++n) {
    const auto& value = arguments[n];
    const auto* alias = schema.arguments()[n].alias_info();
    const bool writes = alias && alias->isWrite();
    if (value.isTensor()) check(value.toTensor(), writes);
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) check(t, writes);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
        if (t) check(*t, writes);
  }
  // batch norm writes to these, which its schema does not say, so their copies would be lost
  for (size_t n = 0; n < arguments.size(); ++n) {
    const auto& argument = schema.arguments()[n];
    c10::IValue& value = (*stack)[stack->size() - arguments.size() + n];
    if (starts_with(argument.name(), "running_") && !argument.alias_info() && value.isTensor() &&
        value.toTensor().is_cuda())
      value = host(value.toTensor());
  }
  DeviceIndex index = device && device->is_cuda() ? device->index() : current;
  if (!inside && !latched.empty()) TORCH_CHECK(false, std::exchange(latched, ""));
  if (waits_here && !inside) wait_in_kernel(index, name);
  {
    Inside guard;
    c10::DeviceGuard on(Device(DeviceType::CUDA, index));
    std::optional<DrawFrom> generator;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) generator.emplace(index);
    at::native::cpu_fallback(op, stack);
  }
  for (const auto& value : torch::jit::last(*stack, schema.returns().size())) {
    if (value.isTensor()) use(value.toTensor(), true);
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) use(t, true);
  }
}

// What an operation does on a device type for which it has no kernel of its own.
void composite(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::VE), stack);
}

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

// Replace torch's own kernels for CUDA, which a CUDA build has, by what its CPU build does.
int replace_kernels() {
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // each kernel that is replaced is a warning
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto names = dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CUDA);
  auto* handles = new std::vector<c10::RegistrationHandleRAII>;
  for (const auto& name : names) {
    auto op = dispatcher.findSchema(name);
    auto kernel = op && is_composite(*op)
                      ? c10::KernelFunction::makeFromBoxedFunction<&composite>()
                      : c10::KernelFunction::makeFromBoxedFunction<&fallback>();
    handles->push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA, std::move(kernel),
                                               std::nullopt, nullptr, "simulated device"));
  }
  return static_cast<int>(names.size());
}

void register_kernels() {
  auto* all = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::CUDA, __FILE__,
                                 __LINE__);
  all->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  auto& m = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__,
                                __LINE__);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_foreach_copy_", foreach_copy_);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("record_stream", record_stream);
}

}  // namespace

// The interface of device.py.
extern "C" {

// Returns the number of kernels of torch's own that were replaced.
int sim_install() {
  int replaced = replace_kernels();
  register_kernels();
  c10::impl::registerDeviceGuard(DeviceType::CUDA, new Guard);
  c10::SetAllocator(DeviceType::CUDA, &device_allocator);
  return replaced;
}

void sim_set_visible(int devices) { visible = devices; }

int sim_exchange_device(int device) {
  int before = current;
  if (device >= 0) current = device;
  return before;
}

// An error of a wait is returned as text, because exceptions must not reach ctypes.
const char* sim_wait(int device, const char* reason, int64_t up_to, int64_t stream) {
  static thread_local std::string error;
  std::optional<c10::StreamId> only;
  if (stream >= 0) only = stream;
  try {
    wait_for(device, reason, up_to < 0 ? INT64_MAX : up_to, only);
  } catch (const c10::Error& caught) {
    error = caught.what_without_backtrace();
    return error.c_str();
  }
  return nullptr;
}

// Returns the number of an event behind what a stream has done so far.
int64_t sim_record(int device, int64_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  StreamKey key(device, stream);
  events[++work] = waited[key];
  events[work][key] = work;
  return work;
}

int sim_is_done(int device, int64_t up_to, int64_t stream) {
  if (stuck) return 0;
  complete(device, up_to, stream);
  return 1;
}

int64_t sim_exchange_stream(int device, int64_t stream) {
  int64_t before = current_streams[device];
  if (stream >= 0) current_streams[device] = stream;
  return before;
}

// What a stream does from now on comes after an event.
void sim_stream_wait(int device, int64_t stream, int64_t event) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto& clock = waited[{device, stream}];
  for (auto [other, number] : events[event]) clock[other] = std::max(clock[other], number);
}

// From now on, kernels of a stream of a device are captured; with -1, none.
void sim_capture(int device, int64_t stream) {
  capturing = device, captured_stream = stream, capturing_thread = std::this_thread::get_id();
}
int sim_is_capturing() { return is_capturing(current); }
int sim_sync_debug_mode() { return sync_debug_mode; }
void sim_set_sync_debug_mode(int mode) { sync_debug_mode = mode; }

int sim_waits() { return static_cast<int>(waits.size()); }
const char* sim_wait_reason(int number) { return waits[number].c_str(); }

int64_t sim_peer_copies() { return peer_copies; }
// Returns the most bytes in use on a device since the last call.
int64_t sim_peak_bytes(int device) {
  return std::exchange(peak_bytes[device], used_bytes[device]);
}

// Returns what the next wait of the host raises, "" if nothing failed.
const char* sim_failure() { return failure.c_str(); }
void sim_set_stuck(int value) { stuck = value; }
int sim_is_stuck() { return stuck; }
void sim_fail(const char* message) { failure = message; }
void sim_latch(const char* message) { latched = message; }

// Give a storage another size, as torch does in a CUDA build only.
void sim_resize(c10::StorageImpl* storage, int64_t nbytes) {
  c10::DeviceGuard on(storage->device());
  auto memory = device_allocator.allocate(nbytes);
  if (size_t kept = std::min<size_t>(storage->nbytes(), nbytes))
    std::memcpy(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(nbytes);
}

int64_t sim_pinned_bytes() { return static_cast<int64_t>(pinned_bytes); }
void sim_register(char* pointer, int64_t size) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  pinned[pointer] = size;
}
void sim_unregister(char* pointer) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  pinned.erase(pointer);
}

// A collective uses the memory at `pointer` until it ends: if freed, it is only overwritten.
void sim_begin_use(const void* pointer) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto block = containing(blocks, pointer);
  if (block != blocks.end()) ++in_flight[block->first];
}
void sim_end_use(const void* pointer) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto block = containing(blocks, pointer);
  if (block == blocks.end() || --in_flight[block->first]) return;
  in_flight.erase(block->first);
  void* start = const_cast<char*>(block->first);
  if (freed_in_flight.erase(start)) {
    used_on.erase(block->first);  // by those that waited since; its address may be used again
    written_on.erase(block->first);
    blocks.erase(block);
    std::free(start);
  }
}
// The current stream of a device uses the memory at `pointer`.
void sim_use(int device, const void* pointer, int writes) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (!note_use(pointer, device, writes)) failure = UNORDERED;
}
// From now on, it is an error if a stream does not wait for another one that used the same memory.
void sim_watch_uses() { is_watching = true; }
void sim_read(void* to, const void* from, int64_t size) { std::memcpy(to, from, size); }
}
