"""Python for processes that tests start, without the seconds in which PyTorch and transformers are loaded: executable() stands for
sys.executable, and its process is a fork of a server that has loaded them and done nothing else. It has its own environment, folder,
streams, arguments and end, and is killed with the process that was started."""

import fcntl
import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types

LOADED = ("torch", "sluice.torch", "accelerate", "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")
_program = _server = None


def executable():
    """A program that takes the words of Python: -c PROGRAM, -m MODULE, or a file, and arguments. Its server is of all workers of a run of
    pytest, and ends after it."""
    global _program
    if _program is None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        folder = f"{tempfile.gettempdir()}/sluice-python-{run}" if run else tempfile.mkdtemp(prefix="sluice-python-")
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until another worker has started it
            _program = f"{folder}/python"
            if not os.path.exists(_program):
                _begin(folder, os.getppid() if run else os.getpid())
    return _program


def _begin(folder, pytest):
    """Starts the server, which ends with that process, and not with this one."""
    global _server
    words = [sys.executable, __file__, "serve", f"{folder}/server", str(pytest)]
    _server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    _server.stdout.readline()
    with open(f"{folder}/made", "w") as file:
        file.write(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} start {folder}/server "$@"\n')
    os.chmod(file.name, 0o755)
    os.rename(file.name, f"{folder}/python")


def _start(address, *words):
    """Lets the server run the words in place of this process, and ends as they end."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps([words, dict(os.environ), os.getcwd()]).encode() + b"\n"
        sent = socket.send_fds(server, [request], [0, 1, 2])
        server.sendall(request[sent:])
        answer = server.makefile().readline()
    code = os.waitstatus_to_exitcode(int(answer or 1 << 8))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _serve(address, pytest):
    """Forks a process for each request, until the process with that number ends. Returns in those processes, with the words."""
    ended = os.pidfd_open(int(pytest))
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    from_here = os.path.dirname(os.path.dirname(__file__))
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(from_here)), "bindings", "python"))
    for name in LOADED:
        importlib.import_module(name)
    del sys.path[0]
    gc.freeze()  # the collector of each process would look at all of this, and copy it
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(16)
    os.write(1, b"ready\n")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listening, ended], [], [])
        if ended in ready:
            shutil.rmtree(os.path.dirname(address), ignore_errors=True)
            os._exit(0)
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            os.close(ended)
            return _become(connection)
        connection.close()


def _become(connection):
    """Returns the words in a process that has what the request says; another one waits for its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 16)
    child = os.fork()
    if child:
        _wait(child, connection)
    words, environment, folder = json.loads(data)
    connection.close()
    for stream, number in zip(streams, (0, 1, 2), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return words


def _wait(child, connection):
    watched = os.pidfd_open(child)
    ready, _, _ = select.select([watched, connection], [], [])
    if watched not in ready:  # who has asked for it was killed
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    try:
        connection.sendall(f"{status}\n".encode())
    except BrokenPipeError:
        pass
    os._exit(0)


def _main_module(words):
    """The module __main__, and the code that it is to run, as Python makes them of its words."""
    words = [word for i, word in enumerate(words) if i or word != "-u"]
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    first = os.getcwd()
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-c":
        file, source, sys.argv = "<string>", words[1], ["-c", *words[2:]]
        first = ""
    else:
        file, rest = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
        if words[0] == "-m":
            sys.path.insert(0, first)
            found = importlib.util.find_spec(file)
            if found.submodule_search_locations is not None:
                found = importlib.util.find_spec(f"{file}.__main__")
            del sys.path[0]
            main.__spec__, main.__package__, file = found, found.name.rpartition(".")[0], found.origin
        else:
            first = os.path.dirname(os.path.abspath(file))
        main.__file__, sys.argv = file, [file, *rest]
        with open(file) as text:
            source = text.read()
    sys.path.insert(0, first)
    sys.modules["__main__"] = main
    return main, compile(source, file, "exec")


if __name__ == "__main__":
    if sys.argv[1] == "start":
        _start(*sys.argv[2:])
    _main, _code = _main_module(_serve(*sys.argv[2:]))
    if "OMP_NUM_THREADS" in os.environ:  # OpenMP has read the server's
        importlib.import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    exec(_code, _main.__dict__)
