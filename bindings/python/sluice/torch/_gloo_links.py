"""Packets between ranks over a Gloo group, for ranks that share no memory."""

from __future__ import annotations

import datetime
import struct
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import torch

from ..errors import CorruptError

PACKET = 256 << 10  # the most bytes of a packet
_ROOM = 4 << 20  # bytes that wait for being sent to a rank, or for being taken of those that it sent
# A message begins with a frame of fixed size, since the receiver has to know how many bytes come: the number of bytes of the packets
# that were gathered, and the first of these. Another message has the rest.
_FRAME = 4096
_LENGTH = struct.Struct("<q")
_PACKET_LENGTH = struct.Struct("<I")
_MOST = 5 * (_ROOM + PACKET)  # bytes that are gathered, where each packet has a byte and its length
# Waiting for bytes has no end here: a rank that does not come is found by Sluice's own deadlines, and a time-out of Gloo's would
# end the connection.
_NEVER = datetime.timedelta(days=3650)
_FAREWELL = -1  # the length with which a rank says that it leaves in order
_TAG = 0x511CE


class Gone(NamedTuple):
    """How a rank has gone."""

    in_order: bool
    how: str  # as in "its process has ended"


class _Peer:
    """Another rank: what waits for being sent there, and what has come from there. A thread for each direction moves it, since a
    send and a receive of Gloo wait. Both end when one of the ranks leaves, or with the connection."""

    def __init__(self, group: Any, rank: int, changed: threading.Condition) -> None:
        """changed: the links' lock, which guards all members, and is told of whatever comes or goes."""
        self._group, self._rank, self._changed = group, rank, changed
        self._out: deque[bytes] = deque()
        self._waiting = 0  # bytes in _out
        self.packets: deque[memoryview] = deque()
        self._untaken = 0  # bytes in packets
        self.gone: Gone | None = None
        self.leaving = False
        self.news = False  # whether room has come, or the rank has gone, since the last wait
        name = f"sluice links {rank}"
        self.sender = threading.Thread(target=self._send, name=name, daemon=True)
        self.receiver = threading.Thread(target=self._receive, name=name, daemon=True)
        self.sender.start()
        self.receiver.start()

    def put(self, packet: bytes) -> bool:
        """Takes a packet, unless there is no room."""
        if self._waiting + len(packet) > _ROOM and self._waiting:
            return False
        if not self.leaving and self.gone is None:  # what is sent to a rank that is gone is lost
            self._out.append(_PACKET_LENGTH.pack(len(packet)) + packet)
            self._waiting += len(packet)
            self._changed.notify_all()
        return True

    def take(self) -> memoryview | None:
        """The next packet that has come."""
        if not self.packets:
            return None
        packet = self.packets.popleft()
        self._untaken -= len(packet)
        self._changed.notify_all()
        return packet

    def _send(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._out or self.leaving or self.gone is not None)
                    if self.gone is not None and not self.gone.in_order:
                        return
                    content, last = bytearray().join(self._out), not self._out
                    self._out.clear()
                if last:
                    self._post(bytearray(_LENGTH.pack(_FAREWELL)))
                    return
                self._post(bytearray(_LENGTH.pack(len(content))) + content)
                with self._changed:
                    self._waiting = sum(map(len, self._out))
                    self.news = True
                    self._changed.notify_all()
        except RuntimeError as error:
            self._lost(error)

    def _post(self, message: bytearray) -> None:
        whole = torch.frombuffer(message + bytes(max(0, _FRAME - len(message))), dtype=torch.uint8)
        self._group.send([whole[:_FRAME]], self._rank, _TAG).wait(_NEVER)
        if len(whole) > _FRAME:
            self._group.send([whole[_FRAME:]], self._rank, _TAG).wait(_NEVER)

    def _receive(self) -> None:
        try:
            while True:
                frame = torch.empty(_FRAME, dtype=torch.uint8)
                self._group.recv([frame], self._rank, _TAG).wait(_NEVER)
                length = _LENGTH.unpack(bytes(frame[: _LENGTH.size].numpy()))[0]
                if length == _FAREWELL:
                    self._leave(Gone(True, "it has left"))
                    return
                if not 0 < length <= _MOST:
                    raise CorruptError(f"a message of {length} bytes came, of which {_MOST} are the most")
                end = _LENGTH.size + length
                whole = frame if end <= _FRAME else torch.empty(end, dtype=torch.uint8)
                if end > _FRAME:
                    whole[:_FRAME] = frame
                    self._group.recv([whole[_FRAME:]], self._rank, _TAG).wait(_NEVER)
                self._take(self._unpacked(whole[_LENGTH.size : end]))
        except (RuntimeError, CorruptError) as error:
            self._lost(error)

    @staticmethod
    def _unpacked(whole: torch.Tensor) -> list[memoryview]:
        """The packets of a message. Raises CorruptError where it has no such packets."""
        view = whole.numpy().data
        found, at = [], 0
        while at < len(view):
            begin = at + _PACKET_LENGTH.size
            size = _PACKET_LENGTH.unpack(view[at:begin])[0] if begin <= len(view) else 0
            at = begin + size
            if at > len(view) or size > PACKET:
                raise CorruptError(f"a packet of {size} bytes came, of which {max(0, len(view) - begin)} are there")
            found.append(view[begin:at])
        return found

    def _take(self, found: list[memoryview]) -> None:
        with self._changed:
            self.packets.extend(found)
            self._untaken += sum(map(len, found))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._untaken < _ROOM or self.leaving)

    def _lost(self, error: Exception) -> None:
        self._leave(Gone(False, f"its connection ended ({' '.join(str(error).split())[:200]})"))

    def _leave(self, gone: Gone) -> None:
        with self._changed:
            self.gone, self.news = self.gone or gone, True
            self._changed.notify_all()


class GlooLinks:
    """The links of one rank with all others: sluice.ranks.Links. Thread rule:
    one thread, but wake() is called from any."""

    packet_bytes = PACKET

    def __init__(self, group: Any) -> None:
        """group: a ProcessGroupGloo of these links alone."""
        self.rank, self.size = group.rank(), group.size()
        self._changed = threading.Condition()
        self._woken = False
        self._group = group  # outlives the threads
        self._peers = {rank: _Peer(group, rank, self._changed) for rank in range(self.size) if rank != self.rank}

    def send(self, to: int, packet: bytes) -> bool:
        """Sends a packet. Returns False where there is no room now."""
        with self._changed:
            return self._peers[to].put(packet)

    def receive(self, source: int) -> memoryview | None:
        """The next packet of that rank; None where there is none."""
        with self._changed:
            return self._peers[source].take()

    def wait(self, seconds: float) -> None:
        """Waits until something may have come or gone, wake() was called since the last wait, or the time has passed."""
        end = time.monotonic() + seconds
        with self._changed:
            if not self._woken and not any(peer.packets or peer.news for peer in self._peers.values()):
                self._changed.wait(max(0.0, end - time.monotonic()))
            self._woken = False
            for peer in self._peers.values():
                peer.news = False

    def wake(self) -> None:
        """Ends the wait, or the next one."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def gone(self, rank: int) -> Gone | None:
        """How a rank has gone, once all that it sent was taken."""
        with self._changed:
            peer = self._peers[rank]
            return None if peer.packets else peer.gone

    def close(self, seconds: float = 2.0) -> None:
        """Leaves in order: what was sent still arrives, within the time. A rank that gets a farewell answers with its own, so that
        the threads that receive end, too: one that woke up while Python ends would end the process."""
        with self._changed:
            for peer in self._peers.values():
                peer.leaving = True
            self._changed.notify_all()
        end = time.monotonic() + seconds
        for peer in self._peers.values():
            peer.sender.join(max(0.0, end - time.monotonic()))
            peer.receiver.join(max(0.0, end - time.monotonic()))
