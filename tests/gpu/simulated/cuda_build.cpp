// What a CUDA build of torch registers, without CUDA: hooks, a device guard, an allocator, and a
// kernel for each operation that has one for the CPU. All of them raise or end the process.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

namespace {

[[noreturn]] void used() { TORCH_CHECK(false, "a part of the CUDA build is used"); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { used(); }
  Device getDevice() const override { used(); }
  void setDevice(Device) const override { used(); }
  void uncheckedSetDevice(Device) const noexcept override { std::abort(); }
  Stream getStream(Device) const override { used(); }
  Stream exchangeStream(Stream) const override { used(); }
  DeviceIndex deviceCount() const noexcept override { return 0; }
};

struct UnusableAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t) override { used(); }
  void copy_data(void*, const void*, size_t) const override { used(); }
};
UnusableAllocator allocator;

void kernel(const c10::OperatorHandle&, torch::jit::Stack*) { used(); }

struct Kernels {
  Kernels() {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CPU))
      handles.push_back(dispatcher.registerImpl(
          name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&kernel>(),
          std::nullopt, nullptr, "CUDA build"));
  }
  std::vector<c10::RegistrationHandleRAII> handles;
};
const auto* kernels = new Kernels;

}  // namespace

struct CudaBuildHooks final : at::CUDAHooksInterface {
  explicit CudaBuildHooks(at::CUDAHooksArgs) {}
  void init() const override { used(); }
  bool hasCUDA() const override { return false; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", CudaBuildHooks)
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
REGISTER_ALLOCATOR(DeviceType::CUDA, &allocator)
