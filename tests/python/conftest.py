"""Puts on sys.path what tests import besides support: the package, and scripts. (pytest puts this folder there, since it
has a conftest.py, and the folder of each test; so no two files of tests may have one name.)"""

import signal
import sys

from support.sluice_process import PACKAGE, SOURCE

sys.path[:0] = [str(PACKAGE), str(SOURCE / "scripts"), str(SOURCE / "tests" / "campaigns")]
# A shell lets what it starts in the background ignore SIGINT, and so would all programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the tests that are marked as long, too: scripts/test.sh --all does")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: shows by many runs what other tests show by a few; it runs with --long alone")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("long")]
