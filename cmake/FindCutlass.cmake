# Finds the CUTLASS headers in the pip package nvidia-cutlass of Python_EXECUTABLE, and defines the target moe::cutlass where
# they are there. MOE_CUTLASS_MISSING says in words why they are not, or is empty. Called by cmake/CudaLibrary.cmake.

# The package is located and not imported: its import needs scipy and more, which headers do not. Asked for at every
# configure, like torch (FindTorchStable.cmake).
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util; s = importlib.util.find_spec('cutlass_library'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE MOE_CUTLASS_PACKAGE
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(MOE_CUTLASS_INCLUDE "${MOE_CUTLASS_PACKAGE}/source/include")
set(MOE_CUTLASS_MISSING "")
if(NOT MOE_CUTLASS_PACKAGE)
  set(MOE_CUTLASS_MISSING "no CUTLASS headers (pip install --no-deps nvidia-cutlass==4.2.0.0)")
elseif(NOT EXISTS "${MOE_CUTLASS_INCLUDE}/cutlass/version.h")
  set(MOE_CUTLASS_MISSING "no CUTLASS headers in ${MOE_CUTLASS_INCLUDE}")
else()
  add_library(moe_cutlass INTERFACE)
  add_library(moe::cutlass ALIAS moe_cutlass)
  target_include_directories(moe_cutlass SYSTEM INTERFACE "${MOE_CUTLASS_INCLUDE}")
  # Assertions in the headers name their file; leave out where this machine keeps them.
  target_compile_options(moe_cutlass INTERFACE "-Xcompiler=-ffile-prefix-map=${MOE_CUTLASS_INCLUDE}/=")
endif()
