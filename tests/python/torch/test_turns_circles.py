"""Threads that wait for each other's turns, of several models that are wrapped on a GPU, the fake one of the tests: they are told where
they would wait for ever, and nowhere else."""

import _thread
import sys
import threading
import types
import weakref

import pytest
import torch
from support.threads_on_gpu import Stops, called, elsewhere, in_threads, looks, turns_of, until, wrapped
from support.wrapped_models import same

import sluice
import sluice.torch._turns


def both_used(of_one):
    """Two models are used by two threads: one by of_one(model, then), in which the thread goes on with then(), which calls the other
    one, and the other one in a call that goes on with a call of the first. Returns what errors have said."""
    with wrapped(2, Stops) as ((one, _), (other, _)):
        expected = called(one, 1)
        both, told = threading.Barrier(2), []

        def then(model):
            both.wait()
            one.stop = other.stop = lambda: None
            assert same(called(model, 1), expected)

        def use():
            try:
                of_one(one, lambda: then(other))
            except sluice.StateError as error:
                told.append(str(error))

        def use_other():
            try:
                stops(other, lambda: then(one))
            except sluice.StateError as error:
                told.append(str(error))

        in_threads(use, use_other)
        del one.stop, other.stop, _
        return told


def stops(model, then):
    model.stop = then
    called(model, 1)


def uses_it_before(model, then):
    model.stop = lambda: None
    called(model, 1)
    then()


def test_threads_that_would_wait_for_each_other_for_ever_are_told():
    told = both_used(stops)
    assert len(told) == 1 and "2 threads wait for each other" in told[0]


@pytest.mark.parametrize(
    "of_one",
    [
        lambda model, then: stops(model, lambda: elsewhere(then)),
        lambda model, then: elsewhere(lambda: stops(model, then)),
        lambda model, then: elsewhere(lambda: uses_it_before(model, then)),
    ],
    ids=["within a call", "around a call", "after a call"],
)
def test_a_pass_goes_before_a_thread_that_waits_for_it_by_another_model(of_one):
    assert both_used(of_one) == []


def test_a_thread_that_python_has_not_started_is_not_what_a_pass_waits_for():
    with wrapped(make=Stops) as (model, _):
        expected = called(model, 1)
        inside, waits, may_end, found = threading.Event(), threading.Event(), threading.Event(), []

        def call():
            model.stop = lambda: None if inside.is_set() else (inside.set(), elsewhere(lambda: may_end.wait(30)))
            assert same(called(model, 1), expected)

        def call_too():
            inside.wait()
            seen = looks(turns_of(model))
            _thread.start_new_thread(lambda: (until(lambda: len(seen) > 3 or found), may_end.set()), ())
            try:
                found.extend(called(model, 1))
            except sluice.StateError as error:
                found.append(error)
            waits.set()

        _thread.start_new_thread(call_too, ())
        in_threads(call, waits.wait)
        assert same(found, expected)
        del model.stop, turns_of(model)._drop_gone


def test_a_circle_whose_links_were_seen_at_different_moments_is_none(monkeypatch):
    turns, began, ended, seen = sluice.torch._turns.Turns(), threading.Event(), threading.Event(), []
    circle = sluice.torch._turns._circle

    def look(wait):
        seen.append(circle(wait))
        return [wait, wait.turns._holders[0]] if len(seen) == 1 else seen[-1]

    monkeypatch.setattr(sluice.torch._turns, "_circle", look)

    def hold():
        with turns:
            began.set()
            until(lambda: len(seen) > 2 or ended.is_set())

    def use():
        began.wait()
        try:
            with turns:
                seen.append("used")
        finally:
            ended.set()

    in_threads(hold, use)
    assert seen[-1] == "used"


def test_a_turn_that_may_end_before_its_thread_goes_on_is_in_no_circle(monkeypatch):
    """That of a pass which a thread has begun ends by itself where the thread is no longer in it. (What keeps it may be gone a moment
    later than the pass.)"""
    one, other, both, kept = sluice.torch._turns.Turns(), sluice.torch._turns.Turns(), threading.Barrier(2), []
    numbers = {}
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: numbers.get(threading.get_ident(), -1))
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", types.SimpleNamespace(queue_callback=kept.append))
    told = []

    def passes():
        me = threading.get_ident()
        numbers[me] = 7
        one.begin_pass()
        del numbers[me]
        both.wait()
        with other:
            pass

    def calls():
        with other:
            both.wait()
            until(lambda: other._queue)
            seen = looks(one)
            threading.Thread(target=lambda: (until(lambda: len(seen) > 5 or told), kept.clear())).start()
            try:
                with one:
                    pass
            except sluice.StateError as error:
                told.append(error)

    in_threads(passes, calls)
    assert told == []


def test_a_call_that_was_interrupted_is_in_no_circle():
    turns = sluice.torch._turns
    wait = turns._Wait(turns.Turns(), 1, weakref.ref(turns._here.life), -1, False)
    ended, runs = (lambda: sys._getframe())(), sys._getframe()
    assert not turns._Holder(1, wait.life, {0: ended}).lasts_beyond(wait)
    assert turns._Holder(1, wait.life, {0: ended, 1: runs}).lasts_beyond(wait)
