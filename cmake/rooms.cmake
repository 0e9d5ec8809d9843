# Headers that most files include are precompiled: by the room core for all rooms and what is linked with them, and by kernels
# for the rooms with -O2, since GCC accepts a precompiled header only with the same optimization.
set(SLUICE_PRECOMPILED
  <algorithm> <array> <atomic> <chrono> <cmath> <condition_variable> <cstdint> <cstring> <filesystem> <fstream>
  <functional> <map> <memory> <mutex> <optional> <span> <string> <string_view> <thread> <utility> <vector>
  <fmt/ranges.h> <nlohmann/json.hpp>)

# sluice_vector_files(VAR room): puts in the place of the files of VAR that are compiled once for each kind of vectors (they have
# HWY_EXPORT) two that include them: each pass over Highway's own headers takes as long as one of these files.
function(sluice_vector_files variable room)
  set(sources ${${variable}})
  set(vectors)
  foreach(source IN LISTS sources)
    file(STRINGS ${source} exports REGEX "^HWY_EXPORT")
    if(exports)
      list(APPEND vectors ${source})
    endif()
  endforeach()
  list(REMOVE_ITEM sources ${vectors})
  list(LENGTH vectors count)
  foreach(half RANGE 1)
    math(EXPR first "${half} * ((${count} + 1) / 2)")
    math(EXPR length "(${count} + 1 - ${half}) / 2")
    set(path ${PROJECT_BINARY_DIR}/generated/${room}_vectors_${half}.cc)
    set(text "#include \"kernels/simd.h\"\n#undef HWY_TARGET_INCLUDE\n#define HWY_TARGET_INCLUDE \"${path}\"\n#include <hwy/foreach_target.h>\n")
    list(SUBLIST vectors ${first} ${length} files)
    foreach(file IN LISTS files)
      string(APPEND text "#include \"${file}\"\n")
    endforeach()
    file(CONFIGURE OUTPUT ${path} CONTENT "${text}" @ONLY)
    list(APPEND sources ${path})
    set_source_files_properties(${path} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    if(SLUICE_SANITIZE STREQUAL "address")  # with these checks it takes ten times as long
      set_source_files_properties(${path} PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS
        "-fno-sanitize=null,alignment,object-size,vptr,bounds;-fno-sanitize-address-use-after-scope")
    endif()
  endforeach()
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()

# sluice_room(NAME libraries...) makes the objects of one room, from all .cc files in its folder and sub-rooms.
function(sluice_room name)
  # The folder in which the project lies may have one of these names, too.
  file(GLOB_RECURSE sources RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${name}/*.cc)
  list(FILTER sources EXCLUDE REGEX "/(dnnl|mpi|cuda|nccl)/")
  list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/)
  if(name MATCHES "^(kernels|optim)$")
    sluice_vector_files(sources ${name})
  endif()
  if(sources)
    add_library(sluice_${name} OBJECT ${sources})
    target_link_libraries(sluice_${name} PUBLIC sluice_options ${ARGN} Threads::Threads)
    if(NOT name STREQUAL core)
      target_link_libraries(sluice_${name} PUBLIC sluice_core)
    endif()
    if(name MATCHES "^(kernels|optim)$")  # loops over elements
      target_compile_options(sluice_${name} PRIVATE $<$<NOT:$<OR:$<CONFIG:Debug>,$<BOOL:${SLUICE_SANITIZE}>>>:-O2>)
    endif()
    if(name MATCHES "^(core|kernels)$")
      target_precompile_headers(sluice_${name} PRIVATE ${SLUICE_PRECOMPILED})
    elseif(name STREQUAL optim)
      target_precompile_headers(sluice_optim REUSE_FROM sluice_kernels)
    else()
      target_precompile_headers(sluice_${name} REUSE_FROM sluice_core)
    endif()
  else()
    add_library(sluice_${name} INTERFACE)
  endif()
  set_property(GLOBAL APPEND PROPERTY SLUICE_ROOM_LIBRARIES ${ARGN})
endfunction()

# sluice_library(NAME rooms...) makes a shared library of the rooms.
function(sluice_library name)
  set(objects)
  foreach(room ${ARGN})
    get_target_property(type sluice_${room} TYPE)
    if(type STREQUAL OBJECT_LIBRARY)
      list(APPEND objects $<TARGET_OBJECTS:sluice_${room}>)
    endif()
  endforeach()
  get_property(libraries GLOBAL PROPERTY SLUICE_ROOM_LIBRARIES)
  list(REMOVE_DUPLICATES libraries)
  add_library(${name} SHARED ${objects})
  target_link_libraries(${name} PUBLIC sluice_options ${libraries} Threads::Threads ${CMAKE_DL_LIBS})
endfunction()

# sluice_program(TARGET) lets a program use the rooms' precompiled header, which takes code of their kind: -fPIC in place of -fPIE.
function(sluice_program target)
  target_compile_options(${target} PRIVATE -fPIC)
  target_precompile_headers(${target} REUSE_FROM sluice_core)
endfunction()
