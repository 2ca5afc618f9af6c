# Finds the headers and the two libraries of the torch that is installed for Python_EXECUTABLE, and defines the target
# moe::torch_stable: torch's stable ABI for version 2.10, and nothing else of torch. Called by CMakeLists.txt.
# A plain look-up of torch/include and torch/lib on purpose: find_package(Torch) also looks for CUDA and adds its own flags.

# The path is asked for at every configure, never cached, because a build folder can outlive the environment it was made in.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util; s = importlib.util.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE MOE_TORCH_ROOT
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(MOE_TORCH_VERSION_HEADER "${MOE_TORCH_ROOT}/include/torch/headeronly/version.h")
if(NOT EXISTS "${MOE_TORCH_VERSION_HEADER}")
  message(FATAL_ERROR "torch: expected torch >= 2.10 with its headers installed for ${Python_EXECUTABLE}, "
                      "got '${MOE_TORCH_ROOT}' (no torch/headeronly/version.h)")
endif()
file(STRINGS "${MOE_TORCH_VERSION_HEADER}" MOE_TORCH_VERSION_LINES REGEX "^#define TORCH_VERSION_(MAJOR|MINOR) [0-9]+")
string(REGEX REPLACE "[^;0-9]" "" MOE_TORCH_VERSION "${MOE_TORCH_VERSION_LINES}")
string(REPLACE ";" "." MOE_TORCH_VERSION "${MOE_TORCH_VERSION}")
if(MOE_TORCH_VERSION VERSION_LESS 2.10)
  message(FATAL_ERROR "torch: expected >= 2.10, got '${MOE_TORCH_VERSION}' in ${MOE_TORCH_ROOT}")
endif()

# Both libraries are named in full: no search path, so none can end up in the result.
set(MOE_TORCH_LIBRARIES)
foreach(name IN ITEMS torch torch_cpu)
  set(library "${MOE_TORCH_ROOT}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}${name}${CMAKE_SHARED_LIBRARY_SUFFIX}")
  if(NOT EXISTS "${library}")
    message(FATAL_ERROR "torch: expected the library ${library}, got no such file")
  endif()
  list(APPEND MOE_TORCH_LIBRARIES "${library}")
endforeach()

add_library(moe_torch_stable INTERFACE)
add_library(moe::torch_stable ALIAS moe_torch_stable)
target_include_directories(moe_torch_stable SYSTEM INTERFACE "${MOE_TORCH_ROOT}/include")
# Torch's headers name themselves in messages; leave out where this machine keeps them.
target_compile_options(moe_torch_stable INTERFACE "-ffile-prefix-map=${MOE_TORCH_ROOT}/include/=")
# 2.10.0.0: the oldest torch on which the binary has to load.
target_compile_definitions(moe_torch_stable INTERFACE TORCH_TARGET_VERSION=0x020A000000000000)
# Without a NEEDED entry for each, loading fails on undefined symbols, and the linker drops libtorch.so (it refers to nothing
# in it) unless told not to.
include(CheckLinkerFlag)
check_linker_flag(CXX "LINKER:--push-state,--no-as-needed" MOE_LINKER_HAS_PUSH_STATE)
if(MOE_LINKER_HAS_PUSH_STATE)
  list(JOIN MOE_TORCH_LIBRARIES "," libraries)
  target_link_options(moe_torch_stable INTERFACE "LINKER:--push-state,--no-as-needed,${libraries},--pop-state")
else()
  target_link_libraries(moe_torch_stable INTERFACE ${MOE_TORCH_LIBRARIES})
endif()
message(STATUS "torch ${MOE_TORCH_VERSION}: ${MOE_TORCH_ROOT}")
