// One call of an operation by XLA, and how its handler for every platform is exported.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "cpu/target.h"
#include "gpu/target.h"
#include "xla/ffi/api/ffi.h"

namespace hipjax {

// A sentence that becomes the call's error.
struct Refusal : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
// The parts of the sentence are put together only where it is needed.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream sentence;
  (sentence << ... << parts);
  throw Refusal(sentence.str());
}

// Operands, results and attributes, each checked as it is asked for.
class Call {
 public:
  Call(const char* name, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs)
      : name_(name), args_(args), rets_(rets), attrs_(attrs) {}

  size_t operands() const { return args_.size(); }
  size_t results() const { return rets_.size(); }

  ffi::AnyBuffer operand(size_t i) const {
    auto got = args_.get<ffi::AnyBuffer>(i);
    require(got.has_value(), name_, " has no operand ", i);
    return *got;
  }
  ffi::AnyBuffer result(size_t i) const {
    auto got = rets_.get<ffi::AnyBuffer>(i);
    require(got.has_value(), name_, " has no result ", i);
    return **got;
  }

  const float* floats(size_t i, int64_t count) const {
    return static_cast<const float*>(checked(operand(i), ffi::F32, count, "operand", i));
  }
  const int* ints(size_t i, int64_t count) const {
    return static_cast<const int*>(checked(operand(i), ffi::S32, count, "operand", i));
  }
  const int8_t* bytes(size_t i, int64_t count) const {
    return static_cast<const int8_t*>(checked(operand(i), ffi::S8, count, "operand", i));
  }
  float* floats_out(size_t i, int64_t count) const {
    return static_cast<float*>(checked(result(i), ffi::F32, count, "result", i));
  }
  int* ints_out(size_t i, int64_t count) const {
    return static_cast<int*>(checked(result(i), ffi::S32, count, "result", i));
  }
  int8_t* bytes_out(size_t i, int64_t count) const {
    return static_cast<int8_t*>(checked(result(i), ffi::S8, count, "result", i));
  }
  // Parameters in float32, or in bfloat16 (also as bits in uint16).
  Vector vector(size_t i, int64_t count) const {
    const ffi::AnyBuffer buffer = operand(i);
    const bool bf16 = buffer.element_type() == ffi::BF16 || buffer.element_type() == ffi::U16;
    const ffi::DataType wanted = bf16 ? buffer.element_type() : ffi::F32;
    return {checked(buffer, wanted, count, "operand", i), bf16};
  }

  int64_t dim(const ffi::AnyBuffer& buffer, int axis) const {  // negative: from the end
    const auto dims = buffer.dimensions();
    const int rank = static_cast<int>(dims.size());
    const int at = axis < 0 ? axis + rank : axis;
    require(at >= 0 && at < rank, name_, ": a buffer has too few axes");
    return dims[at];
  }

  int integer(const char* attribute) const {
    auto got = attrs_.get<int64_t>(attribute);
    require(got.has_value(), name_, ": attribute ", attribute, " is missing");
    return static_cast<int>(*got);
  }
  float real(const char* attribute) const {
    auto got = attrs_.get<float>(attribute);
    require(got.has_value(), name_, ": attribute ", attribute, " is missing");
    return *got;
  }
  ffi::Span<const int64_t> integers(const char* attribute) const {
    auto got = attrs_.get<ffi::Span<const int64_t>>(attribute);
    require(got.has_value(), name_, ": attribute ", attribute, " is missing");
    return *got;
  }

 private:
  void* checked(const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t count, const char* kind,
                size_t i) const {
    require(buffer.element_type() == type, name_, " got another dtype for ", kind, " ", i);
    const auto elements = static_cast<int64_t>(buffer.element_count());
    require(elements == count, name_, " ", kind, " ", i, " has ", elements, " elements; ", count,
            " were expected");
    return buffer.untyped_data();
  }

  const char* name_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  ffi::Dictionary attrs_;
};

// Runs an operation's body, and turns what it refuses into the call's error.
template <class Target, class Body>
ffi::Error answered(const char* name, Body body, typename Target::Context context,
                    ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  try {
    Target target(context);
    return body(target, Call(name, args, rets, attrs));
  } catch (const std::exception& refusal) {
    return ffi::Error::InvalidArgument(refusal.what());
  }
}

// Exports hipjax_cpu_NAME, hipjax_cuda_NAME and hipjax_rocm_NAME for the function template
// `template <class Target> ffi::Error body(Target&, const Call&)`. A handler only launches:
// it allocates nothing on the device and waits for nothing, so XLA may record it.
#define HIPJAX_HANDLER(platform, name, body, Target, context, ...)                              \
  _Pragma("GCC visibility push(default)")                                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                \
      hipjax_##platform##_##name,                                                               \
      ([](typename Target::Context c, ffi::RemainingArgs a, ffi::RemainingRets r,               \
          ffi::Dictionary d) {                                                                  \
        const auto call = [](Target& t, const Call& one) { return body<Target>(t, one); };      \
        return answered<Target>(#name, call, c, a, r, d);                                       \
      }),                                                                                       \
      ffi::Ffi::Bind().Ctx<context>().RemainingArgs().RemainingRets().Attrs(), ##__VA_ARGS__);  \
  _Pragma("GCC visibility pop")

#define HIPJAX_OPERATION(name, body)                                                            \
  HIPJAX_HANDLER(cpu, name, body, Cpu, ffi::ThreadPool)                                         \
  HIPJAX_HANDLER(cuda, name, body, Cuda, ffi::PlatformStream<void*>,                            \
                 {ffi::Traits::kCmdBufferCompatible})                                           \
  HIPJAX_HANDLER(rocm, name, body, Rocm, ffi::PlatformStream<void*>,                            \
                 {ffi::Traits::kCmdBufferCompatible})                                           \
  static const Listed listed_##name(#name)

// The names of all operations, for registration.
struct Listed {
  explicit Listed(const char* name);
};

}  // namespace hipjax
