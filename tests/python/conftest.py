"""Puts on sys.path what tests import besides support: the package, and scripts. (pytest puts this folder there, since it
has a conftest.py, and the folder of each test; so no two files of tests may have one name.)"""

import os
import sys

from support.sluice_process import BUILD, PACKAGE, SOURCE

sys.path[:0] = [str(PACKAGE), str(SOURCE / "scripts"), str(SOURCE / "tests" / "campaigns")]
os.environ.setdefault("SLUICE_LIBRARY_PATH", str(BUILD / "lib"))
