# Device code for GPUs, by one clang and no vendor's SDK. Without a clang the library still
# builds; it keeps a sentence on what is missing, which the end of the build shows too.

# The newest of the usual clangs if it is new enough, and its linker of AMD code objects.
function(find_device_clang)
  if(NOT HIPJAX_CLANG)
    foreach(name clang++-22 clang++-21 clang++-20 clang++-19 clang++ amdclang++)
      find_program(candidate_${name} ${name} HINTS /opt/rocm/llvm/bin /opt/rocm/bin)
      mark_as_advanced(candidate_${name})
      if(candidate_${name})
        execute_process(COMMAND ${candidate_${name}} -dumpversion
          OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE)
        if(version VERSION_GREATER_EQUAL 19)
          set(HIPJAX_CLANG ${candidate_${name}} CACHE FILEPATH "" FORCE)
          break()
        endif()
      endif()
    endforeach()
  endif()
  # Clang looks for ld.lld beside itself and on the path; Debian's has its version in its name
  # there. So clang is asked.
  if(HIPJAX_CLANG)
    execute_process(COMMAND ${HIPJAX_CLANG} -print-prog-name=ld.lld
      OUTPUT_VARIABLE linker OUTPUT_STRIP_TRAILING_WHITESPACE)
    find_program(HIPJAX_LLD NAMES ${linker} ld.lld NO_CACHE)
    set(HIPJAX_LLD "${HIPJAX_LLD}" PARENT_SCOPE)
  endif()
endfunction()

function(device_code target)
  set(clang_needed "On Debian and Ubuntu: apt-get install clang-19 lld-19.")
  set(incbins "")
  set(objects "")
  set(outputs "")
  set(missing "")
  set(common -std=c++17 ${HIPJAX_ARITHMETIC} -Wall -Wextra -I${CMAKE_SOURCE_DIR}/csrc)
  set(source ${CMAKE_SOURCE_DIR}/csrc/gpu/kernels.cc)
  macro(add_object name file)
    list(APPEND outputs ${file})
    string(APPEND incbins
      "asm(\".section .rodata\\n.balign 4096\\nhipjax_${name}_begin: .incbin \\\"${file}\\\"\\n\"\n"
      "    \"hipjax_${name}_end: .byte 0\\n.previous\\n\");\n"
      "extern \"C\" const char hipjax_${name}_begin[], hipjax_${name}_end[];\n")
    string(APPEND objects "{\"${name}\", hipjax_${name}_begin, hipjax_${name}_end}, ")
  endmacro()
  if(HIPJAX_GPU_CODE)
    find_device_clang()
  endif()
  if(NOT HIPJAX_GPU_CODE)
    set(missing "This build was asked to leave GPU code out.")
  elseif(NOT HIPJAX_CLANG)
    set(missing "No clang++ of version 19 or newer was found, so this build has no GPU code and "
      "GPUs run plain JAX. ${clang_needed} Or name one: HIPJAX_CLANG.")
    string(CONCAT missing ${missing})
  else()
    message(STATUS "hipjax: GPU code by ${HIPJAX_CLANG}")
    if(NOT HIPJAX_LLD)
      string(CONCAT missing "No ld.lld was found beside ${HIPJAX_CLANG}, so this build has no code "
        "for AMD GPUs, which run plain JAX. ${clang_needed}")
    else()
      foreach(architecture ${HIPJAX_AMD_ARCHITECTURES})
        set(file ${CMAKE_BINARY_DIR}/${architecture}.co)
        # .resources: registers and spills of every kernel, for tools/rdna_report.py.
        add_custom_command(OUTPUT ${file}
          BYPRODUCTS ${CMAKE_BINARY_DIR}/${architecture}.resources
          COMMAND ${CMAKE_SOURCE_DIR}/cmake/logged ${CMAKE_BINARY_DIR}/${architecture}.resources
            ${HIPJAX_CLANG} -x hip --offload-arch=${architecture} --offload-device-only
            --no-gpu-bundle-output -nogpuinc -nogpulib ${common}
            -Rpass-analysis=kernel-resource-usage -MD -MF ${file}.d -MT ${file} ${source} -o ${file}
          DEPENDS ${source} DEPFILE ${file}.d COMMENT "Device code for ${architecture}" VERBATIM)
        add_object(${architecture} ${file})
      endforeach()
    endif()
    set(file ${CMAKE_BINARY_DIR}/kernels.ptx)
    add_custom_command(OUTPUT ${file}
      COMMAND ${HIPJAX_CLANG} -x cuda --cuda-device-only --cuda-gpu-arch=sm_80 -nocudainc
        -nocudalib -S -Wno-unknown-cuda-version ${common} -MD -MF ${file}.d -MT ${file} ${source}
        -o ${file}
      DEPENDS ${source} DEPFILE ${file}.d COMMENT "Device code for NVIDIA" VERBATIM)
    add_object(ptx ${file})
  endif()
  set(HIPJAX_INCBINS "${incbins}")
  set(HIPJAX_OBJECTS "${objects}")
  set(HIPJAX_MISSING "${missing}")
  configure_file(csrc/gpu/code_objects.cc.in ${CMAKE_BINARY_DIR}/code_objects.cc @ONLY)
  set_source_files_properties(${CMAKE_BINARY_DIR}/code_objects.cc
    PROPERTIES OBJECT_DEPENDS "${outputs}")
  target_sources(${target} PRIVATE ${CMAKE_BINARY_DIR}/code_objects.cc)
  if(missing)
    add_custom_command(TARGET ${target} POST_BUILD
      COMMAND ${CMAKE_COMMAND} -E echo "hipjax: ${missing}" VERBATIM)
  endif()
endfunction()
