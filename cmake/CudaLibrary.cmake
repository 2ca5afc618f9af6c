# Builds libmoe_megakernel_cuda, the CUDA kernels and their bindings, where there is a compiler for them. MOE_CUDA=ON makes
# it an error that there is none, OFF leaves the library out, AUTO (the default) builds it where it can and says why not.
# A library of its own, because CPU builds of torch lack the functions it needs. Called by CMakeLists.txt.
set(MOE_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO (where nvcc and the CUTLASS headers are there), ON, OFF")
set_property(CACHE MOE_CUDA PROPERTY STRINGS AUTO ON OFF)
# The oldest nvcc that the kernels have been compiled with.
set(MOE_LEAST_NVCC 13.0)

file(GLOB MOE_CUDA_INSTANCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_SOURCE_DIR}" kernels/*/instances/*.cu)
file(GLOB MOE_CUDA_SOURCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_SOURCE_DIR}" kernels/forward/*.cu
     kernels/backward/*.cu kernels/layer/*.cu)

# Sets MOE_CUDA_MISSING to the reason why the kernels cannot be compiled here, or to nothing, and enables the language.
macro(moe_find_cuda)
  set(MOE_CUDA_MISSING "")
  if(MOE_CUDA STREQUAL "OFF")
    set(MOE_CUDA_MISSING "MOE_CUDA=OFF")
  elseif(NOT MOE_CUDA_SOURCES)
    set(MOE_CUDA_MISSING "no kernels/forward/*.cu")
  else()
    # Real code for Hopper and no PTX: the kernels use instructions of sm_90a, which no other architecture runs.
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 90a-real)
    endif()
    include(CheckLanguage)
    check_language(CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
      set(MOE_CUDA_MISSING "no nvcc that compiles (searched PATH and CUDACXX)")
    else()
      enable_language(CUDA)
      include(cmake/FindCutlass.cmake)
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS MOE_LEAST_NVCC)
        set(MOE_CUDA_MISSING "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than ${MOE_LEAST_NVCC}")
      else()
        set(MOE_CUDA_MISSING "${MOE_CUTLASS_MISSING}")
      endif()
    endif()
  endif()
endmacro()

moe_find_cuda()
if(MOE_CUDA_MISSING)
  if(NOT MOE_CUDA STREQUAL "AUTO" AND NOT MOE_CUDA STREQUAL "OFF")
    message(FATAL_ERROR "MOE_CUDA: expected what builds the CUDA kernels, got ${MOE_CUDA_MISSING}")
  endif()
  message(STATUS "CUDA kernels: not built: ${MOE_CUDA_MISSING}")
  return()
endif()
list(LENGTH MOE_CUDA_INSTANCES MOE_NUM_CUDA_INSTANCES)
message(STATUS "CUDA kernels: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_ARCHITECTURES}")
message(STATUS "CUDA instantiations: ${MOE_NUM_CUDA_INSTANCES}")

# An object library, so that the kernels are compiled without torch's headers and flags.
add_library(moe_cuda_kernels OBJECT ${MOE_CUDA_SOURCES} ${MOE_CUDA_INSTANCES})
target_include_directories(moe_cuda_kernels PRIVATE kernels/include kernels "${CMAKE_SOURCE_DIR}")
target_link_libraries(moe_cuda_kernels PRIVATE moe::cutlass)
target_compile_features(moe_cuda_kernels PRIVATE cuda_std_17)
target_compile_options(
  moe_cuda_kernels PRIVATE --expt-relaxed-constexpr -O3 -Xcompiler=-Wall
                           "-Xcompiler=-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=")
if(MOE_CXX_HAS_NO_GNU_UNIQUE)
  target_compile_options(moe_cuda_kernels PRIVATE -Xcompiler=-fno-gnu-unique)
endif()
set_target_properties(
  moe_cuda_kernels
  PROPERTIES CUDA_EXTENSIONS OFF
             CUDA_VISIBILITY_PRESET hidden
             VISIBILITY_INLINES_HIDDEN ON
             POSITION_INDEPENDENT_CODE ON)
# One compilation of a kernel takes gigabytes and minutes.
set_property(GLOBAL APPEND PROPERTY JOB_POOLS moe_cuda=2)
set_target_properties(moe_cuda_kernels PROPERTIES JOB_POOL_COMPILE moe_cuda)
if(MOE_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set_target_properties(moe_cuda_kernels PROPERTIES CUDA_COMPILER_LAUNCHER "${MOE_CCACHE}")
endif()

set(MOE_CUDA_BINDINGS kernels/bindings/forward.cpp kernels/bindings/layer_forward.cpp kernels/bindings/backward.cpp)
if(EXISTS "${CMAKE_SOURCE_DIR}/kernels/bindings/route_cuda.cpp")
  list(APPEND MOE_CUDA_BINDINGS kernels/bindings/route_cuda.cpp)
endif()
find_package(CUDAToolkit REQUIRED)
add_library(moe_megakernel_cuda MODULE ${MOE_CUDA_BINDINGS})
moe_configure_module(moe_megakernel_cuda)
target_include_directories(moe_megakernel_cuda PRIVATE kernels)
target_compile_definitions(moe_megakernel_cuda PRIVATE USE_CUDA)
# The run-time is linked in, so that the library does not need the version that torch brings; its symbols stay inside.
target_link_libraries(moe_megakernel_cuda PRIVATE moe_cuda_kernels CUDA::cudart_static)
target_link_options(moe_megakernel_cuda PRIVATE "LINKER:--exclude-libs,ALL")
set_target_properties(moe_megakernel_cuda PROPERTIES LINKER_LANGUAGE CXX)
install(TARGETS moe_megakernel_cuda LIBRARY DESTINATION moe_megakernel)
