"""A redo log never holds more than it was granted, and counts what it has written, held and missed."""

import threading

from capture.redo_log.budget_room import RedoRoom


def test_nothing_is_held_beyond_the_grant():
    room = RedoRoom()
    assert not room.hold(1)
    assert room.is_out
    room.grant(100)
    assert room.hold(60)
    room.published(50)
    assert room.hold(50)
    assert room.tell() == (100, 0)
    assert room.hold(20), "a segment that has become smaller needs nobody"
    room.grant(30)
    assert room.hold(50)
    assert not room.hold(51)
    assert not room.hold(60)
    assert room.is_out


def test_what_comes_behind_a_step_without_room_waits_for_the_next_grant():
    room = RedoRoom()
    room.grant(100)
    assert not room.hold(200)
    room.missed(200)
    assert not room.hold(10), "it could not be made use of"
    assert room.tell() == (0, 200)
    room.grant(100)
    assert room.tell() == (0, 0)
    room.grant(100)
    assert room.hold(10)


def test_what_was_given_up_is_free_again():
    room = RedoRoom()
    room.grant(100)
    assert room.hold(100)
    room.published(0)
    assert room.tell() == (0, 0)


def test_between_telling_and_the_grant_nothing_is_held():
    room = RedoRoom()
    room.grant(100)
    room.tell()
    held = []
    holding = threading.Thread(target=lambda: held.append(room.hold(60)))
    holding.start()
    assert room.tell() == (0, 0)
    assert held == []
    room.grant(50)
    holding.join()
    assert held == [False]
