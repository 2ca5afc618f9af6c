# Builds the libraries of benchmarks/ where MOE_BENCHMARKS=ON; no build of the package needs them. Behind CudaLibrary.cmake,
# which finds the compiler. Called by CMakeLists.txt.
option(MOE_BENCHMARKS "Build the CUDA libraries of the benchmarks" OFF)
if(NOT MOE_BENCHMARKS)
  return()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "MOE_BENCHMARKS: expected what builds CUDA, got ${MOE_CUDA_MISSING}")
endif()

# Headers of the kernels that need no more than nvcc; no torch, no CUTLASS.
add_library(row_mover MODULE EXCLUDE_FROM_ALL benchmarks/row_mover/row_mover.cu)
target_include_directories(row_mover PRIVATE kernels/include)
target_compile_features(row_mover PRIVATE cuda_std_17)
target_compile_options(row_mover PRIVATE -O3 -Xcompiler=-Wall "-Xcompiler=-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=")
set_target_properties(
  row_mover
  PROPERTIES PREFIX lib
             CUDA_EXTENSIONS OFF
             CUDA_VISIBILITY_PRESET hidden
             POSITION_INDEPENDENT_CODE ON
             LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/benchmarks")
