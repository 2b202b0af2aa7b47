# Finds Python, nanobind and the headers inside Python packages: jaxlib (XLA FFI) and nvidia-cutlass.

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module
  OPTIONAL_COMPONENTS Development.SABIModule)

execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

# Sets `variable` to a directory inside an installed Python package, without importing the package.
function(jax_mla_find_package_headers variable package subdirectory install_hint)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; print(next(iter(u.find_spec('${package}').submodule_search_locations)))"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE location RESULT_VARIABLE result ERROR_QUIET)
  if(NOT result EQUAL 0 OR NOT IS_DIRECTORY "${location}/${subdirectory}")
    message(FATAL_ERROR "${Python_EXECUTABLE} has no package ${package}: pip install ${install_hint}")
  endif()
  set(${variable} "${location}/${subdirectory}" PARENT_SCOPE)
endfunction()

jax_mla_find_package_headers(JAX_MLA_XLA_FFI_INCLUDE_DIR jaxlib include jaxlib)
