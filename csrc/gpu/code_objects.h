// The device code inside this library: AMD code objects by architecture, and NVIDIA PTX.
#pragma once

#include <cstddef>

namespace hipjax {

struct CodeObject {
  const char* architecture;  // "gfx1151"; "ptx" for NVIDIA, which its driver compiles
  const char* begin;
  const char* end;
};

// All of them, `count` many; none if no clang was found when the library was built.
const CodeObject* code_objects(size_t& count);
// What the build lacked to have all of them, as a sentence; empty if nothing.
const char* missing_code();

}  // namespace hipjax
