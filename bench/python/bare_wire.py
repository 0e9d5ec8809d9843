"""Makes hosts from this machine (scripts/hosts.sh, which needs root), and plain TCP streams between them.

The cores of the machine also process the packets, and a program delays them. Streams that carry as many bytes as a run of ranks, beside the
same computing in shared memory, show how much of a slower step such hosts cost any program."""
import contextlib
import socket
import subprocess
import sys
import threading
import time

from side_by_side import ROOT

ADDRESS = "10.99.0.{}"  # of a host, counted from 1
PORT = 5000
PIECE = 1 << 20


@contextlib.contextmanager
def hosts(count, rate, folder, delay="0ms"):
    """Makes hosts, and gives the path of a program that runs a command on one of them: PROGRAM ADDRESS COMMAND..."""
    on = folder / "on"
    command = [ROOT / "scripts/hosts.sh", "--hosts", str(count), "--rate", rate, "--delay", delay, "--on", on]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        if made.stdout.readline() != "ready\n":
            sys.exit("scripts/hosts.sh made no hosts")
        yield str(on)
        made.stdin.close()


@contextlib.contextmanager
def streams(on, count, bytes_per_second):
    """While the block runs, each host sends so many bytes a second to the next one."""
    own = [sys.executable, __file__]
    senders = [subprocess.Popen([on, ADDRESS.format(host), *own, ADDRESS.format(host % count + 1), str(int(bytes_per_second))],
                                stdin=subprocess.PIPE) for host in range(1, count + 1)]
    try:
        yield
        if any(sender.poll() is not None for sender in senders):
            sys.exit("bare_wire: a stream between hosts has ended early")
    finally:
        for sender in senders:
            sender.stdin.close()
        for sender in senders:
            sender.wait()


def receive(server):
    connection, _ = server.accept()
    memory = bytearray(PIECE)
    while connection.recv_into(memory):
        pass


def send(peer, bytes_per_second):
    end = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((peer, PORT))
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
    due = time.monotonic()
    while True:
        connection.sendall(bytes(PIECE))
        due += PIECE / bytes_per_second
        time.sleep(max(0, due - time.monotonic()))


def main():
    server = socket.create_server(("0.0.0.0", PORT))
    threading.Thread(target=receive, args=(server,), daemon=True).start()
    threading.Thread(target=send, args=(sys.argv[1], float(sys.argv[2])), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
