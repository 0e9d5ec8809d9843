# Every dependency, its version and its reason are listed in docs/dependencies.md.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(TBB REQUIRED)
find_package(CLI11 REQUIRED)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(hwy REQUIRED IMPORTED_TARGET libhwy libhwy-contrib)
pkg_check_modules(liburing REQUIRED IMPORTED_TARGET liburing)
pkg_check_modules(ompi IMPORTED_TARGET ompi-c)  # Open MPI is optional
# CUDA's header cuda.h and its compiler nvcc are optional, and of version 13 or later. They are in CUDA's toolkit, and in the
# Python packages nvidia-cuda-runtime and nvidia-cuda-nvcc.
file(GLOB cuda_packages ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu13)
find_path(CUDA_HEADERS cuda.h PATHS ${cuda_packages} PATH_SUFFIXES include NO_DEFAULT_PATH)
find_path(CUDA_HEADERS cuda.h HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include)
if(CUDA_HEADERS)
  file(STRINGS ${CUDA_HEADERS}/cuda.h cuda_version REGEX "^#define CUDA_VERSION [0-9]+")
  string(REGEX REPLACE "[^0-9]" "" cuda_version "${cuda_version}")
endif()
execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/kernels.sh --nvcc
  OUTPUT_VARIABLE cuda_compiler ERROR_VARIABLE no_cuda_compiler OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
if(SLUICE_TESTS)
  find_package(GTest REQUIRED)
endif()
if(SLUICE_BENCH)
  find_package(benchmark REQUIRED)
endif()
