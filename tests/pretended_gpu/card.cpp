// Pretended GPUs for a torch that is built for CPUs: devices "cuda:0", "cuda:1", ... with real numbers in host memory.
//
// An operator without a kernel for CUDA (all of them) falls back to the CPU's kernel on the same memory, after a check
// that no operand lies on the host or on another GPU, which a real one would refuse. Launches, waits of the host, bytes
// that operators touch, and live memory are counted. What this cannot show: streams, and arithmetic of a real GPU.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto CUDA = c10::DeviceType::CUDA;
thread_local DeviceIndex current = 0;

DeviceIndex number_of_gpus() {
  const char* text = std::getenv("PRETENDED_GPUS");
  return static_cast<DeviceIndex>(text == nullptr ? 1 : std::atoi(text));
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before(CUDA, current);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(CUDA, current); }
  void setDevice(Device device) const override {
    if (device.has_index()) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  Stream getStream(Device device) const noexcept { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept { return stream; }
  DeviceIndex deviceCount() const noexcept override { return number_of_gpus(); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

c10::impl::DeviceGuardImplRegistrar registered(CUDA, new Guard());

}  // namespace

namespace at {

struct CUDAHooks final : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return number_of_gpus(); }
  int getNumGPUs() const override { return number_of_gpus(); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = current;
    setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void setCurrentDevice(DeviceIndex device) const override {
    if (device >= 0) current = device;
  }
  void deviceSynchronize(DeviceIndex) const override {}
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  std::string showConfig() const override { return "pretended"; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current); }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {

std::mutex lock;
std::map<std::string, long> launches, waits;
std::map<std::string, double> touched;  // bytes of operands and results, by operator
std::atomic<long> live{0}, peak{0};

void count(std::map<std::string, long>& where, const std::string& name) {
  std::lock_guard<std::mutex> hold(lock);
  ++where[name];
}

struct Kept {
  at::Tensor host;
  long bytes;
};

void drop(void* kept) {
  auto* one = static_cast<Kept*>(kept);
  live -= one->bytes;
  delete one;
}

double bytes_of(const at::Tensor& tensor) { return double(tensor.numel()) * tensor.element_size(); }

// The same memory, seen as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor on_gpu(const at::Tensor& host, Device gpu) {
  const long bytes = static_cast<long>(bytes_of(host));
  auto* kept = new Kept{host, bytes};
  const long now = live += bytes;
  long before = peak;
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
  auto options = host.options().device(gpu).requires_grad(false);
  return at::for_blob(host.data_ptr(), host.sizes()).strides(host.strides()).context(kept, drop).options(options)
      .target_device(gpu).make_tensor();
}

// Operators whose results have a size, or a value, that the host must wait for.
bool makes_host_wait(const std::string& name) {
  static const char* const names[] = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::unique_dim", "aten::masked_select",
      "aten::unique_consecutive", "aten::is_nonzero", "aten::equal", "aten::bincount", "aten::repeat_interleave"};
  for (const char* one : names)
    if (name == one) return true;
  return false;
}

bool takes_indices_of_host(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
}

struct Operands {
  std::vector<at::Tensor> originals, grown;
  std::string strangers;
  bool any_gpu = false;
  Device gpu{CUDA, 0};
  double bytes = 0;

  // What the CPU's kernel gets for an operand.
  at::Tensor see(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0) strangers += " " + c10::str(tensor.sizes()) + " on cpu";  // numbers may come from anywhere
      return tensor;
    }
    if (any_gpu && tensor.device() != gpu && tensor.dim() > 0)
      strangers += " " + c10::str(tensor.sizes()) + " on " + tensor.device().str();
    gpu = any_gpu ? gpu : tensor.device();
    any_gpu = true;
    bytes += bytes_of(tensor);
    return on_host(tensor);
  }
};

void take_operands(const c10::FunctionSchema& schema, torch::jit::Stack& stack, size_t begin, Operands& seen) {
  const size_t num = schema.arguments().size();
  seen.originals.resize(num);
  seen.grown.resize(num);
  seen.gpu = Device(CUDA, current);
  for (size_t i = 0; i < num; ++i) {
    auto& value = stack[begin + i];
    if (value.isTensor()) {
      const at::Tensor tensor = seen.originals[i] = value.toTensor();
      if (schema.arguments()[i].is_out() && tensor.is_cuda() && tensor.numel() == 0) {  // the kernel will resize it
        seen.any_gpu = true;
        seen.gpu = tensor.device();
        seen.grown[i] = at::empty({0}, tensor.options().device(at::kCPU));
        value = seen.grown[i];
      } else {
        value = seen.see(tensor);
      }
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(seen.see(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(seen.see(*tensor)) : tensor);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (value.toDevice().has_index()) seen.gpu = value.toDevice();
      value = Device(at::kCPU);
    }
  }
}

// A result that is one of the operands, written to.
at::Tensor written(const c10::FunctionSchema& schema, const c10::AliasInfo& alias, const Operands& seen) {
  for (size_t i = 0; i < seen.originals.size(); ++i) {
    const auto* of = schema.arguments()[i].alias_info();
    if (of == nullptr || !(*of == alias)) continue;
    if (seen.grown[i].defined()) {
      auto* impl = seen.originals[i].unsafeGetTensorImpl();
      const at::Tensor& made = seen.grown[i];
      if (made.numel() > 0) impl->set_storage_keep_dtype(on_gpu(made, seen.gpu).storage());
      impl->set_sizes_and_strides(made.sizes(), made.strides(), 0);
    }
    return seen.originals[i];
  }
  TORCH_CHECK(false, "pretended GPU: ", schema.name(), " writes to none of its operands");
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  Operands seen;
  take_operands(schema, *stack, stack->size() - schema.arguments().size(), seen);
  TORCH_CHECK(!seen.any_gpu || seen.strangers.empty() || takes_indices_of_host(name),
              "Expected all tensors to be on the same device (pretended GPU): ", name, " on ", seen.gpu.str(), " got",
              seen.strangers);
  {
    // The CPU's kernel may dispatch again; nothing above the CPU's key is wanted.
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    op.callBoxed(stack);
  }
  const auto& returns = schema.returns();
  const size_t first = stack->size() - returns.size();
  bool host_waits = makes_host_wait(name);
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[first + i];
    const auto* alias = returns[i].alias_info();
    if (value.isTensor() && value.toTensor().defined()) {
      if (alias != nullptr && alias->isWrite()) {
        value = written(schema, *alias, seen);
        continue;
      }
      TORCH_CHECK(alias == nullptr, "pretended GPU: no view ", name);
      const at::Tensor made = value.toTensor();
      seen.bytes += bytes_of(made);
      value = on_gpu(made, seen.gpu);
    } else if (value.isTensorList() && alias == nullptr) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& made : value.toTensorVector()) list.push_back(on_gpu(made, seen.gpu));
      value = list;
    } else if (value.isScalar() || value.isBool() || value.isInt() || value.isDouble()) {
      host_waits = true;
    }
  }
  if (host_waits) count(waits, name);
  if (name.rfind("aten::empty", 0) == 0) return;  // memory is only handed out
  std::lock_guard<std::mutex> hold(lock);
  ++launches[name];
  touched[name] += seen.bytes;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  const bool to_gpu = self.is_cuda(), from_gpu = src.is_cuda();
  const std::string name = to_gpu && from_gpu ? "aten::copy_" : to_gpu ? "copy host to gpu" : "copy gpu to host";
  count(launches, name);
  if (!(to_gpu && from_gpu) && !non_blocking) count(waits, name);
  at::Tensor to = to_gpu ? on_host(self) : self;
  const at::Tensor from = from_gpu ? on_host(src) : src;
  {
    std::lock_guard<std::mutex> hold(lock);
    touched[name] += bytes_of(to) + bytes_of(from);
  }
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  to.copy_(from);
  return self;
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
bool is_pinned(const at::Tensor&, std::optional<at::Device>) { return false; }

// Of many tensors at once: torch would take them one by one on a device without a kernel, and count as many launches.
void register_operators_on_lists() {
  struct Quiet final : public c10::WarningHandler {  // it says that torch's own way is replaced
    void process(const c10::Warning&) override {}
  } quiet;
  c10::WarningUtils::WarningHandlerGuard silence(&quiet);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0) continue;
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    const std::string full = name.name.substr(6) + overload;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

std::string as_json(const std::map<std::string, double>& values) {
  std::string text = "{";
  for (const auto& [name, value] : values)
    text += (text.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(static_cast<long>(value));
  return text + "}";
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", copy_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
}

extern "C" {
void pretended_begin() { register_operators_on_lists(); }
void pretended_reset() {
  std::lock_guard<std::mutex> hold(lock);
  launches.clear();
  waits.clear();
  touched.clear();
  peak = live.load();
}
void pretended_wait(const char* name) { count(waits, name); }
void pretended_set_device(int device) { current = static_cast<DeviceIndex>(device); }
int pretended_device() { return current; }
long pretended_live() { return live; }
long pretended_peak() { return peak; }
const char* pretended_counts() {
  static thread_local std::string text;
  std::lock_guard<std::mutex> hold(lock);
  text = "{\"launches\": " + as_json({launches.begin(), launches.end()}) +
         ", \"waits\": " + as_json({waits.begin(), waits.end()}) + ", \"bytes\": " + as_json(touched) + "}";
  return text.c_str();
}
}
