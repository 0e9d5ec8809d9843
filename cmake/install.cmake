# Other projects build on the C ABI: sluice.h and libsluice_c.so. The C++ library, which the program and the matrix library
# need, is installed without headers.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS sluice sluice_c sluice_main sluice_dnnl
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
foreach(plugin sluice_mpi sluice_cuda)
  if(TARGET ${plugin})
    install(TARGETS ${plugin} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
endforeach()
if(SLUICE_KERNELS)
  install(FILES ${SLUICE_KERNELS} DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(FILES bindings/c/sluice.h bindings/c/sluice_arrays.h bindings/c/sluice_device.h bindings/c/sluice_files.h
  bindings/c/sluice_pipeline.h bindings/c/sluice_ranks.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES bindings/c/examples/network.c bindings/c/examples/ranks.c bindings/c/examples/CMakeLists.txt
  DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples)

configure_package_config_file(cmake/sluice-config.cmake.in ${CMAKE_BINARY_DIR}/sluice-config.cmake
  PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/sluice-config-version.cmake COMPATIBILITY ExactVersion)
install(FILES ${CMAKE_BINARY_DIR}/sluice-config.cmake ${CMAKE_BINARY_DIR}/sluice-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
# Neither file contains the prefix, because it is given when installing, and an installation may be moved.
file(RELATIVE_PATH SLUICE_PC_TO_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/sluice.pc.in ${CMAKE_BINARY_DIR}/sluice.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/sluice.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
