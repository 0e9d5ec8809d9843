"""How ranks join: packets over a Gloo group, between ranks that are threads here, in order, unchanged, each once."""

import random
import struct
import threading
import time

import pytest
import torch
from support import sluice_package  # noqa: F401: skips where the library is not built

from sluice.torch._gloo_links import _NEVER, _TAG, PACKET, GlooLinks


def of_each_rank(size, make):
    """Returns the results of make(rank) for each rank, in threads of this process, since ranks wait for each other."""
    made = [None] * size
    threads = [threading.Thread(target=lambda rank=rank: made.__setitem__(rank, make(rank))) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def groups_of(size):
    store = torch.distributed.HashStore()
    return of_each_rank(size, lambda rank: torch.distributed.ProcessGroupGloo(store, rank, size, _NEVER))


def links_of(size):
    groups = groups_of(size)
    return of_each_rank(size, lambda rank: GlooLinks(groups[rank]))


def packet_of(source, to, number):
    generator = random.Random(f"{source} {to} {number}")
    return generator.randbytes(generator.choice([1, 8, 100, 4088, 4089, 70000, PACKET]))


def taken(links, source):
    found = links.receive(source)
    return None if found is None else bytes(found)


def test_packets_arrive_in_order_unchanged_and_once():
    size, count = 3, 60
    links = links_of(size)
    wrong = []

    def run(own):
        others = [rank for rank in range(size) if rank != own.rank]
        sent, received = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
        end = time.monotonic() + 60
        while min(*sent.values(), *received.values()) < count and time.monotonic() < end:
            moved = False
            for other in others:
                if sent[other] < count and own.send(other, packet_of(own.rank, other, sent[other])):
                    sent[other], moved = sent[other] + 1, True
                packet = taken(own, other)
                if packet is not None:
                    if packet != packet_of(other, own.rank, received[other]):
                        wrong.append((own.rank, other, received[other]))
                    received[other], moved = received[other] + 1, True
            if not moved:
                own.wait(1.0)
        if set(sent.values()) | set(received.values()) != {count}:
            wrong.append((own.rank, sent, received))

    of_each_rank(size, lambda rank: run(links[rank]))
    assert wrong == []
    assert [taken(own, rank) for own in links for rank in range(size) if rank != own.rank] == [None] * size * (size - 1)
    for own in links:
        own.close()


def wait_for(question):
    end = time.monotonic() + 30
    while not question() and time.monotonic() < end:
        time.sleep(0.01)
    return question()


def test_a_rank_that_takes_nothing_leaves_no_room_and_then_some():
    one, other = links_of(2)
    packet, sent = bytes(PACKET), 0
    while one.send(1, packet):
        sent += 1
        assert sent < 10000
        time.sleep(0.005)
    assert sent > 4
    received = 0
    end = time.monotonic() + 30
    while received < sent and time.monotonic() < end:
        received += taken(other, 0) is not None
    assert received == sent and wait_for(lambda: one.send(1, packet))
    one.close()
    other.close()


def test_what_was_sent_before_leaving_arrives_and_then_the_rank_is_gone():
    one, other = links_of(2)
    assert one.gone(1) is None and other.gone(0) is None
    for number in range(5):
        assert one.send(1, packet_of(0, 1, number))
    one.close()
    assert wait_for(lambda: other._peers[0].gone is not None)
    assert other.gone(0) is None  # there are packets of it
    assert [taken(other, 0) for _ in range(6)] == [*(packet_of(0, 1, number) for number in range(5)), None]
    assert other.gone(0).in_order
    other.close()


def test_a_wait_ends_by_a_wake_by_a_packet_and_by_its_time():
    one, other = links_of(2)
    one.wake()
    one.wait(60.0)  # for the wake that came before
    timer = threading.Timer(0.2, one.wake)
    timer.start()
    one.wait(60.0)
    other.send(0, b"x")
    one.wait(60.0)
    assert taken(one, 1) == b"x"
    one.wait(0.01)
    one.close()
    other.close()


def message(length, content=b""):
    """Returns the bytes of a rank whose message claims to have so many bytes."""
    return torch.frombuffer(bytearray(struct.pack("<q", length) + content + bytes(4088 - len(content))), dtype=torch.uint8)


@pytest.mark.parametrize("sent, says", [
    (message(-7), "a message of -7 bytes came"),
    (message(1 << 40), f"a message of {1 << 40} bytes came"),
    (message(3, b"abc"), "a packet of 0 bytes came, of which 0 are there"),
    (message(9, struct.pack("<I", 6) + b"abcde"), "a packet of 6 bytes came, of which 5 are there"),
])  # fmt: skip
def test_what_is_no_message_ends_the_connection(sent, says):
    made = groups_of(2)
    links = GlooLinks(made[0])
    made[1].send([sent], 0, _TAG).wait()
    assert wait_for(lambda: links.gone(1) is not None)
    assert not links.gone(1).in_order and says in links.gone(1).how
    links.close(0.0)
