# The source lists. BUILD.bazel spells out the same globs; tests/test_build.py compares what the two
# expand to. A backend or an operation is added by adding files. A kernel instance is added by adding
# a row to its kernel's instances.inc: see cmake/instances.cmake.

# Host code of every build (the schedule too: programs for GPUs are lowered on machines without one).
file(GLOB JAX_MLA_CPU_SOURCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  csrc/*.cc
  csrc/core/*.cc
  csrc/*/*binding.cc
  csrc/*/cpu/*.cc
  csrc/*/schedule/*.cc)

# Added by a CUDA build: host code beside the kernels, and the kernels that every architecture runs.
file(GLOB JAX_MLA_CUDA_SOURCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  csrc/gpu/*.cc
  csrc/*/cuda.cc
  csrc/*/choose_backend.cc
  csrc/*/*.cu
  csrc/*/merge/*.cu
  csrc/*/ragged/*.cc
  csrc/*/ragged/*.cu
  csrc/*/sm80/*.cc
  csrc/*/sm80/*.cu)

# Added if Hopper is among the architectures: its kernels use instructions of sm_90a alone.
file(GLOB_RECURSE JAX_MLA_SM90_SOURCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  csrc/*/sm90/*.cc
  csrc/*/sm90/*.cu)

# Added if sm_100 is among the architectures: CUTLASS's kernel uses instructions of sm_100a alone.
file(GLOB_RECURSE JAX_MLA_SM100_SOURCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  csrc/*/sm100/*.cc
  csrc/*/sm100/*.cu)
