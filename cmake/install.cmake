include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(SLUICE_HEADERS ${CMAKE_INSTALL_INCLUDEDIR}/sluice)  # #include "engine/engine.h", below this folder
install(TARGETS sluice sluice_c sluice_main sluice_dnnl
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
# The C ABI: #include <sluice.h>, and -lsluice_c.
install(FILES bindings/c/sluice.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
foreach(room core allocator kernels offload optim engine models)
  install(DIRECTORY ${room} DESTINATION ${SLUICE_HEADERS} FILES_MATCHING PATTERN "*.h"
    PATTERN "dnnl" EXCLUDE
    # Of the vector loops, which are compiled here alone.
    PATTERN "*-inl.h" EXCLUDE
    PATTERN "simd.h" EXCLUDE
    PATTERN "attention_common.h" EXCLUDE)
endforeach()

configure_package_config_file(cmake/sluice-config.cmake.in ${CMAKE_BINARY_DIR}/sluice-config.cmake
  PATH_VARS CMAKE_INSTALL_LIBDIR SLUICE_HEADERS
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/sluice-config-version.cmake COMPATIBILITY ExactVersion)
install(FILES ${CMAKE_BINARY_DIR}/sluice-config.cmake ${CMAKE_BINARY_DIR}/sluice-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
# Neither file names the prefix: it is given when installing, and an installation may be moved.
file(RELATIVE_PATH SLUICE_PC_TO_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/sluice.pc.in ${CMAKE_BINARY_DIR}/sluice.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/sluice.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
