#!/usr/bin/env python3
"""Joins network namespaces by wires on which each packet takes a stated time, for kernels without netem.

    scripts/delay_bridge.py SECONDS NAMESPACE...

makes the TUN device "wire" in each namespace and passes packets from one to another for as long as it runs. The last number of an
address counts the namespaces from 1. It prints "ready" once the devices exist; the caller sets their addresses, packet sizes and
bandwidth. It needs root, and ends at the end of its standard input.
"""

import collections
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
LARGEST = 1 << 16


def make_wire(namespace):
    """Returns the descriptor from which the namespace's packets are read. The device exists as long as it is open."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            sys.exit(f"delay_bridge: {namespace} cannot be entered: {os.strerror(ctypes.get_errno())}")
    try:
        wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
    except OSError as error:
        sys.exit(f"delay_bridge: a TUN device cannot be made in {namespace}: {error}")
    return wire


def receiver(packet, wires):
    """Returns the index of the wire to which a packet is addressed, or None: not every packet is addressed to a
    host."""
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    return packet[19] - 1 if 0 < packet[19] <= len(wires) else None


def take(wire, wires, due, under_way):
    try:
        while True:
            packet = os.read(wire, LARGEST)
            to = receiver(packet, wires)
            if to is not None:
                under_way.append((due, wires[to], packet))
    except BlockingIOError:
        pass


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    delay = float(sys.argv[1])
    wires = [make_wire(namespace) for namespace in sys.argv[2:]]
    print("ready", flush=True)
    under_way = collections.deque()  # in the order in which they are due, since the delay is the same for all
    while True:
        wait = max(0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([sys.stdin, *wires], [], [], wait)
        if sys.stdin in readable:
            return
        now = time.monotonic()
        for wire in readable:
            take(wire, wires, now + delay, under_way)
        while under_way and under_way[0][0] <= time.monotonic():
            _, wire, packet = under_way.popleft()
            try:
                os.write(wire, packet)
            except OSError:
                pass  # a network may lose packets: this one does where a host is gone or receives too slowly


main()
