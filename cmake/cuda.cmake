# Decides whether to build the CUDA kernels, and for which architectures. Enables the language CUDA.
# Sets JAX_MLA_WITH_CUDA, JAX_MLA_WITH_SM90A, JAX_MLA_WITH_SM100A, JAX_MLA_CUDA_VERSION and the texts for
# build_info().

set(JAX_MLA_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO, ON or OFF")
set(JAX_MLA_CUDA_ARCHS "" CACHE STRING "CUDA architectures, e.g. 90a or native; empty for all")
foreach(option JAX_MLA_CUDA JAX_MLA_CUDA_ARCHS)
  # Users of `pip install .` set environment variables; an explicit -D wins over them.
  if(DEFINED ENV{${option}} AND "${${option}}" MATCHES "^(AUTO)?$")
    set(${option} "$ENV{${option}}")
  endif()
endforeach()
string(TOUPPER "${JAX_MLA_CUDA}" JAX_MLA_CUDA)
if(NOT JAX_MLA_CUDA MATCHES "^(AUTO|ON|OFF)?$")
  message(FATAL_ERROR "JAX_MLA_CUDA: expected AUTO, ON or OFF, got ${JAX_MLA_CUDA}")
endif()

# The architectures among Ampere, Ada, Hopper (90a, for wgmma) and Blackwell that this nvcc knows. PTX is
# for later GPUs, and for those of Blackwell that are not listed.
function(jax_mla_default_architectures result)
  execute_process(
    COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
    OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
  set(architectures "")
  foreach(architecture 80 86 89 90a 100 120)
    string(REGEX MATCH "^[0-9]+" number ${architecture})
    if(known MATCHES "sm_${number}[^0-9]")
      list(APPEND architectures ${architecture}-real)
    endif()
  endforeach()
  set(${result} ${architectures} 90-virtual PARENT_SCOPE)
endfunction()

# The GPUs of this machine.
function(jax_mla_native_architectures result)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE capabilities RESULT_VARIABLE status ERROR_QUIET)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "JAX_MLA_CUDA_ARCHS=native, but nvidia-smi finds no GPU here")
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
  list(REMOVE_DUPLICATES capabilities)
  list(TRANSFORM capabilities REPLACE "\\." "")
  list(TRANSFORM capabilities APPEND "-real")
  set(${result} ${capabilities} PARENT_SCOPE)
endfunction()

set(JAX_MLA_WITH_CUDA OFF)
set(JAX_MLA_WITH_SM90A OFF)
set(JAX_MLA_WITH_SM100A OFF)
set(JAX_MLA_CUDA_VERSION "")
set(JAX_MLA_CUDA_ARCHS_TEXT "")
if(JAX_MLA_CUDA STREQUAL "OFF")
  set(JAX_MLA_BUILD_TEXT "CPU only (JAX_MLA_CUDA=OFF)")
  return()
endif()

include(CheckLanguage)
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80)  # for CMake's own checks; the targets get theirs below
endif()
check_language(CUDA)
find_program(JAX_MLA_NVCC NAMES $ENV{CUDACXX} nvcc NO_CACHE NO_CMAKE_SYSTEM_PATH)  # as check_language does
set(why_no_cuda "")
if(CMAKE_CUDA_COMPILER OR (JAX_MLA_NVCC AND JAX_MLA_CUDA STREQUAL "ON"))
  enable_language(CUDA)  # a failure shows what nvcc says
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.5)  # for cudaGetDriverEntryPointByVersion
    set(why_no_cuda "nvcc ${CMAKE_CUDA_COMPILER_VERSION} found, 12.5 or newer needed")
  endif()
elseif(JAX_MLA_NVCC)
  set(why_no_cuda "${JAX_MLA_NVCC} fails with this host compiler; JAX_MLA_CUDA=ON shows why, CUDAHOSTCXX names another")
else()
  set(why_no_cuda "nvcc not found")
endif()
if(why_no_cuda)
  if(JAX_MLA_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "JAX_MLA_CUDA=ON, but ${why_no_cuda}: put it on PATH or set CUDACXX")
  endif()
  set(JAX_MLA_BUILD_TEXT "CPU only (${why_no_cuda})")
  return()
endif()
if(JAX_MLA_CUDA_ARCHS STREQUAL "")
  jax_mla_default_architectures(CMAKE_CUDA_ARCHITECTURES)
elseif(JAX_MLA_CUDA_ARCHS STREQUAL "native")
  jax_mla_native_architectures(CMAKE_CUDA_ARCHITECTURES)
else()
  string(REGEX REPLACE "[, ]+" ";" CMAKE_CUDA_ARCHITECTURES "${JAX_MLA_CUDA_ARCHS}")
endif()
if(JAX_MLA_CUDA_ARCHS)  # plain 90 has no wgmma, which the kernels for Hopper need
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90(-real)?$" "90a\\1")
  list(REMOVE_DUPLICATES CMAKE_CUDA_ARCHITECTURES)
endif()
set(JAX_MLA_WITH_CUDA ON)
if("${CMAKE_CUDA_ARCHITECTURES}" MATCHES "90a")
  set(JAX_MLA_WITH_SM90A ON)
endif()
if("${CMAKE_CUDA_ARCHITECTURES}" MATCHES "(^|;)100[af]?(-real)?(;|$)")
  set(JAX_MLA_WITH_SM100A ON)
endif()
set(JAX_MLA_CUDA_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
list(JOIN CMAKE_CUDA_ARCHITECTURES " " JAX_MLA_CUDA_ARCHS_TEXT)
set(JAX_MLA_BUILD_TEXT "CPU and CUDA ${JAX_MLA_CUDA_VERSION} (${JAX_MLA_CUDA_ARCHS_TEXT})")
