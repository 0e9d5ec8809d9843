set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_INSTALL_RPATH "$ORIGIN/../lib:$ORIGIN")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# Debug information would take two fifths of the compiler's time, so only presets that need it turn it on. -O2 takes 1.5 times as
# long as -O1, so only rooms with loops over elements have it (rooms.cmake).
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1 -DNDEBUG")  # -g1 gives stack traces their lines
# Files of a room are compiled together, which saves time: each parses the same headers, and makes the same templates,
# otherwise. Their own names therefore differ within a room. -DCMAKE_UNITY_BUILD=OFF is for work on one file.
set(CMAKE_UNITY_BUILD ON CACHE BOOL "Compile several files at a time")
set(CMAKE_UNITY_BUILD_BATCH_SIZE 32)
find_program(CCACHE ccache)
if(CCACHE)
  # ccache refuses precompiled headers unless it may ignore macros and times in them.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE})
endif()

add_library(sluice_options INTERFACE)
# With -ffp-contract=off the compiler cannot fuse a multiply and an add on one machine and not on another.
target_compile_options(sluice_options INTERFACE -Wall -Wextra -Wshadow -Werror -ffp-contract=off -fno-math-errno)
target_include_directories(sluice_options INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # -fpch-preprocess shows ccache which precompiled header is used. -Wsubobject-linkage takes a file that is compiled with others for
  # a header. GCC collects its garbage once it has 800 MB, and not all the time, which takes an eighth of the compiler's time.
  target_compile_options(sluice_options INTERFACE -fpch-preprocess -Wno-subobject-linkage
    "SHELL:--param ggc-min-expand=200" "SHELL:--param ggc-min-heapsize=800000")
elseif(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(sluice_options INTERFACE -Wthread-safety)
endif()
if(SLUICE_SANITIZE STREQUAL "address")
  # GCC takes what its own checks add for uses of what has no value yet.
  target_compile_options(sluice_options INTERFACE -fsanitize=address,undefined -fno-omit-frame-pointer -Wno-maybe-uninitialized)
  target_link_options(sluice_options INTERFACE -fsanitize=address,undefined)
elseif(SLUICE_SANITIZE STREQUAL "thread")
  target_compile_options(sluice_options INTERFACE -fsanitize=thread -fno-omit-frame-pointer)
  set_source_files_properties(core/threads.cc PROPERTIES COMPILE_DEFINITIONS SLUICE_PLAIN_THREADS)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(sluice_options INTERFACE -fno-tree-sra)  # GCC 12 crashes in that pass on kernels/
  endif()
  target_link_options(sluice_options INTERFACE -fsanitize=thread)
endif()
