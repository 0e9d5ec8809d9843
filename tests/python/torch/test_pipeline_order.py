"""That stages of a pipeline never wait for each other for ever, nor longer than they must: what they do in a step is gone through for more
stages and micro-batches than ranks can be started for, with all that _pipeline.py, _borders.py and _stages.py wait for in a step whose
messages bring the tensors' kinds, and with a shared table."""

import itertools

import pytest
from support import sluice_package  # noqa: F401: skips where the library is not built

from sluice.torch._order import Lags, actions_of, calls_in_flight

SECONDS = {"forward": 1, "backward": 2}
IN_HALVES = {"forward": 1, "backward": 1, "weights": 1}


class Stage:
    """The steps of a stage: passes, what it begins (an end of a message), and messages for which it waits."""

    def __init__(self, stage, stages, chunks, items, lags):
        self.stage, self.stages, self.items, self.lags = stage, stages, items, lags
        self.last, self.looks_up, self.embeds = chunks * stages - 1, stage + 1 == stages, stage == 0
        self.steps, self.sent, self.added = [], {}, 0

    def begin(self, end, *message):
        self.steps.append((end, message))
        if end == "send":
            self.sent.setdefault(message[:-1], []).append(message)

    def wait(self, *message):
        self.steps.append(("wait", message))

    def limit(self, item, *border):
        while (sent := self.sent.get(border)) and sent[0][-1] <= item:
            self.wait(*sent.pop(0))

    def take(self, *message):
        self.begin("receive", *message)
        self.wait(*message)

    def forward(self, item, number):
        if number > 0:
            self.take("value", number, item)
        if number == 0:
            self.take("lookup", item)
        self.steps.append(("pass", "forward"))
        if number == self.last and item + self.lags.ahead < self.items:
            self.begin("send", "lookup", item + self.lags.ahead)

    def backward(self, item, number):
        if number < self.last:
            self.take("gradient", number + 1, item)
        self.steps.append(("pass", "backward"))
        if number == self.last:
            self.add(item - self.lags.behind)
        if number == 0:
            self.limit(item - self.lags.looked_up, "gradient of lookup")
            self.begin("send", "gradient of lookup", item)

    def weights(self, item, number):
        self.steps.append(("pass", "weights"))

    def send_output(self, item, number):
        self.begin("send", "value", number + 1, item)

    def send_gradient(self, item, number):
        self.limit(item - self.lags.sent, "gradient", number)
        self.begin("send", "gradient", number, item)

    def add(self, until):
        for item in range(self.added, until + 1):
            self.take("gradient of lookup", item)
            self.added = item + 1

    def run(self, actions):
        for item in range(min(self.lags.ahead, self.items) if self.looks_up else 0):
            self.begin("send", "lookup", item)
        for what, item, chunk in actions:
            if not what.startswith("receive"):  # which has no effect before the message's tensors are known
                getattr(self, what)(item, chunk * self.stages + self.stage)
        if self.looks_up:
            self.add(self.items - 1)
        return self.steps


def seconds_of(stages, chunks, items, order, **lags):
    """The seconds of a step, or None where stages wait for ever."""
    lists = [actions_of(order, stages, chunks, items, stage) for stage in range(stages)]
    (found,) = {Lags.of(actions, stages, chunks) for actions in lists}  # all stages find the same
    steps = [Stage(stage, stages, chunks, items, found._replace(**lags)).run(actions) for stage, actions in enumerate(lists)]
    now, begun, at = [0] * stages, {}, [0] * stages
    moves = True
    while moves:
        moves = False
        for stage in range(stages):
            for kind, what in itertools.islice(steps[stage], at[stage], None):
                if kind == "pass":
                    now[stage] += (IN_HALVES if order == "zb-h1" else SECONDS)[what]
                elif kind != "wait":
                    begun[kind, what] = now[stage]
                elif ("send", what) in begun and ("receive", what) in begun:
                    now[stage] = max(now[stage], begun["send", what], begun["receive", what])
                else:
                    break
                at[stage] += 1
                moves = True
    return max(now) if at == [len(own) for own in steps] else None


SIZES = [*range(1, 17), 23, 24]


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8])
def test_stages_go_on(stages):
    for chunks, items, order in itertools.product((1, 2, 3), SIZES, ("1f1b", "gpipe", "zb-h1")):
        if chunks == 1 or order != "zb-h1":
            assert seconds_of(stages, chunks, items, order) is not None, (chunks, items, order)


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8])
def test_gradients_of_weights_fill_the_time_in_which_stages_would_wait(stages):
    for items in SIZES:
        if items >= stages:  # a third of the bubble is left (Qi et al. 2023, table 1)
            assert seconds_of(stages, 1, items, "zb-h1") == 3 * items + stages - 1, items


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8])
def test_stages_wait_for_nothing_but_what_they_need(stages):
    for chunks, items in itertools.product((1, 2, 3), SIZES):
        if items >= stages:
            assert seconds_of(stages, chunks, items, "1f1b") == 3 * (chunks * items + stages - 1), (chunks, items)


def test_with_less_between_them_stages_wait():
    assert seconds_of(4, 2, 8, "1f1b", ahead=1) is None and seconds_of(4, 2, 8, "1f1b", behind=1) is None
    assert seconds_of(4, 2, 7, "1f1b", sent=1) > seconds_of(4, 2, 7, "1f1b")


def test_calls_in_flight_are_counted_by_chunk():
    first, last = (calls_in_flight(actions_of("1f1b", 2, 2, 4, stage), 2) for stage in range(2))
    assert [now.keep for now in first[:4]] == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert max(sum(now.keep) for now in first) == 5 and max(sum(now.keep) for now in last) == 3
    assert ((4, 4), (0, 0)) in calls_in_flight(actions_of("gpipe", 2, 2, 4, 0), 2)


def test_so_is_what_backward_passes_leave():
    first, last = (calls_in_flight(actions_of("zb-h1", 2, 1, 4, stage), 1) for stage in range(2))
    assert max(now.keep for now in first) == (2,) and max(now.left for now in first) == (1,)
    assert max(now.keep for now in last) == (1,) and max(now.left for now in last) == (2,)
    assert ((0,), (0,)) in first and ((0,), (0,)) in last
