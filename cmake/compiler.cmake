# Enables the language C++. CMake's own errors do not say what to install, so the compiler is checked
# before project() would fail on it.

include(CheckLanguage)
set(jax_mla_compiler_help
  "Install one (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++; conda: conda install \
-c conda-forge gxx), or set the environment variable CXX to yours. Then run the same command again.")

check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  if(DEFINED ENV{CXX})
    message(FATAL_ERROR
      "jax_mla needs a C++20 compiler, but the one that CXX names, $ENV{CXX}, is missing or does not "
      "work. ${jax_mla_compiler_help}")
  endif()
  message(FATAL_ERROR
    "jax_mla needs a C++20 compiler, but none was found. ${jax_mla_compiler_help}")
endif()
enable_language(CXX)
if(NOT cxx_std_20 IN_LIST CMAKE_CXX_COMPILE_FEATURES)
  message(FATAL_ERROR
    "jax_mla needs a C++20 compiler, but ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID} "
    "${CMAKE_CXX_COMPILER_VERSION}. ${jax_mla_compiler_help}")
endif()
