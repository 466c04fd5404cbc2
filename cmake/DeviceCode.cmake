# Device code for GPUs, by one clang and no vendor's SDK. Without a clang the library still
# builds, and says what is missing.

function(find_device_clang result)
  set(found "${HIPJAX_CLANG}")
  if(NOT found)
    foreach(name clang++ clang++-22 clang++-21 clang++-20 clang++-19 amdclang++)
      find_program(candidate_${name} ${name} HINTS /opt/rocm/llvm/bin /opt/rocm/bin)
      if(candidate_${name})
        execute_process(COMMAND ${candidate_${name}} -dumpversion
          OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE)
        if(version VERSION_GREATER_EQUAL 19)
          set(found ${candidate_${name}})
          break()
        endif()
      endif()
    endforeach()
  endif()
  # AMD code objects are linked by lld.
  find_program(HIPJAX_LLD NAMES ld.lld-22 ld.lld-21 ld.lld-20 ld.lld-19 ld.lld HINTS /opt/rocm/llvm/bin)
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

function(device_code target)
  find_device_clang(clang)
  set(incbins "")
  set(objects "")
  set(outputs "")
  set(common -std=c++17 -O3 -ffp-contract=off -Wall -Wextra -I${CMAKE_SOURCE_DIR}/csrc)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS csrc/*.h)
  set(source ${CMAKE_SOURCE_DIR}/csrc/gpu/kernels.cc)
  macro(add_object name file)
    list(APPEND outputs ${file})
    string(APPEND incbins
      "asm(\".section .rodata\\n.balign 64\\nhipjax_${name}_begin: .incbin \\\"${file}\\\"\\n\"\n"
      "    \"hipjax_${name}_end: .byte 0\\n.previous\\n\");\n"
      "extern \"C\" const char hipjax_${name}_begin[], hipjax_${name}_end[];\n")
    string(APPEND objects "{\"${name}\", hipjax_${name}_begin, hipjax_${name}_end}, ")
  endmacro()
  if(NOT HIPJAX_GPU_CODE)
    message(STATUS "hipjax: no GPU code was asked for")
  elseif(NOT clang)
    message(WARNING "hipjax: no clang++ of version 19 or newer was found, so this build has no "
      "GPU code; on GPUs plain JAX will be used. On Debian and Ubuntu: apt-get install clang-19 "
      "lld-19. Or name one: HIPJAX_CLANG=/path/to/clang++.")
  else()
    if(NOT HIPJAX_LLD)
      message(WARNING "hipjax: ld.lld was not found, so this build has no code for AMD GPUs. "
        "On Debian and Ubuntu: apt-get install lld-19.")
    else()
      foreach(architecture ${HIPJAX_AMD_ARCHITECTURES})
        set(file ${CMAKE_BINARY_DIR}/${architecture}.co)
        add_custom_command(OUTPUT ${file}
          COMMAND ${CMAKE_SOURCE_DIR}/cmake/logged ${CMAKE_BINARY_DIR}/${architecture}.resources
            ${clang} -x hip --offload-arch=${architecture} --offload-device-only
            --no-gpu-bundle-output -nogpuinc -nogpulib ${common}
            -Rpass-analysis=kernel-resource-usage ${source} -o ${file}
          DEPENDS ${source} ${sources} VERBATIM)
        add_object(${architecture} ${file})
      endforeach()
    endif()
    set(file ${CMAKE_BINARY_DIR}/kernels.ptx)
    add_custom_command(OUTPUT ${file}
      COMMAND ${clang} -x cuda --cuda-device-only --cuda-gpu-arch=sm_80 -nocudainc -nocudalib -S
        -Wno-unknown-cuda-version ${common} ${source} -o ${file}
      DEPENDS ${source} ${sources} VERBATIM)
    add_object(ptx ${file})
    message(STATUS "hipjax: GPU code by ${clang}")
  endif()
  set(HIPJAX_INCBINS "${incbins}")
  set(HIPJAX_OBJECTS "${objects}")
  configure_file(csrc/gpu/code_objects.cc.in ${CMAKE_BINARY_DIR}/code_objects.cc @ONLY)
  set_source_files_properties(${CMAKE_BINARY_DIR}/code_objects.cc PROPERTIES OBJECT_DEPENDS "${outputs}")
  target_sources(${target} PRIVATE ${CMAKE_BINARY_DIR}/code_objects.cc)
endfunction()
