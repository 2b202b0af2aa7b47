# Adds the kernel instances to the source lists: one source file in the build tree for each row of an
# instances.inc. tools/kernel_instances.py writes them, for Bazel as well.

file(GLOB_RECURSE instance_tables CONFIGURE_DEPENDS csrc/instances.inc)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  ${instance_tables} tools/kernel_instances.py)
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/tools/kernel_instances.py"
    "${CMAKE_CURRENT_BINARY_DIR}/instances"
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE instances COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" instances "${instances}")
foreach(instance ${instances})
  if(instance MATCHES "/instances/csrc/.*/sm90/")
    list(APPEND JAX_MLA_SM90_SOURCES ${instance})
  elseif(instance MATCHES "/instances/csrc/.*/sm100/")
    list(APPEND JAX_MLA_SM100_SOURCES ${instance})
  else()
    list(APPEND JAX_MLA_CUDA_SOURCES ${instance})
  endif()
endforeach()
