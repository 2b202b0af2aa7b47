# The source lists. BUILD.bazel spells out the same globs; tests/test_build.py compares what the two
# expand to. A backend, an instance or an operation is added by adding files.

# Host code of every build (the schedule too: programs for GPUs are lowered on machines without one).
file(GLOB JAX_MLA_CPU_SOURCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  csrc/*.cc
  csrc/core/*.cc
  csrc/*/binding.cc
  csrc/*/cpu.cc
  csrc/*/cpu_*.cc
  csrc/*/schedule.cc)

# Added by a CUDA build: host code beside the kernels, and the kernels.
file(GLOB_RECURSE JAX_MLA_CUDA_SOURCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  csrc/*.cu
  csrc/*/cuda.cc
  csrc/gpu/*.cc
  csrc/*/sm*/*.cc)
