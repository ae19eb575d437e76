"""The group's control channel over loopback: who gets in, what arrives, how it ends."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tandem_worker.errors import GroupLostError
from tandem_worker.group.leader import GroupLeader
from tandem_worker.group.link import Kind, Link, LinkClosedError, Loss, encode_object
from tandem_worker.group.member import GroupMember

IDENTITY = "m (unified), revision r"
Causes = queue.SimpleQueue


class Scene:
    """A leader that listens, and followers on threads."""

    def __init__(self, size: int) -> None:
        self.causes: Causes[Loss] = queue.SimpleQueue()
        self.leaving = threading.Event()
        self.leader = GroupLeader(size, IDENTITY, on_lost=self.causes.put, on_leaving=self.leaving.set)
        self.port = self.leader.listen("127.0.0.1", 0)
        self.links: list[Link] = []

    def follow(self, rank: int, identity: str = IDENTITY) -> tuple[GroupMember, Causes[Loss]]:
        causes: Causes[Loss] = queue.SimpleQueue()
        member = GroupMember(rank, pod=f"m-{rank}", identity=identity, on_lost=causes.put)
        threading.Thread(target=member.meet, args=("127.0.0.1", self.port), daemon=True).start()
        return member, causes

    def knock(self, rank: int) -> Link:
        """A follower whose end the test plays itself."""
        link = Link(socket.create_connection(("127.0.0.1", self.port), 5))
        link.send_object(Kind.HELLO, {"rank": rank, "pod": f"m-{rank}", "identity": IDENTITY})
        self.links.append(link)
        return link

    def form(self) -> None:
        self.leader.gather({"storePort": 7})


@pytest.fixture
def make_scene() -> Iterator[Callable[[int], Scene]]:
    scenes: list[Scene] = []

    def make(size: int) -> Scene:
        scenes.append(Scene(size))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.leader.stop(timeout=0.1)
        for link in scene.links:
            link.close()


def test_the_life_of_a_group(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(3)
    (second, _), (first, causes) = scene.follow(2), scene.follow(1)
    scene.form()
    for member in (first, second):
        eventually(lambda member=member: member.formed)
    second.report(b"two")
    first.report(b"one")
    assert scene.leader.collect() == [b"one", b"two"]
    scene.leader.announce(b"plan")
    scene.leader.send_steps({1: b"a", 2: b"b"})
    assert [first.receive(), second.receive()] == [(Kind.PLAN, b"plan")] * 2
    assert (first.receive(), second.receive()) == ((Kind.STEP, b"a"), (Kind.STEP, b"b"))
    first.leave()
    assert scene.leaving.wait(5)
    scene.leader.stop(timeout=0.1)
    assert first.receive()[0] is Kind.STOP
    assert causes.empty()
    assert scene.causes.empty()


def test_strangers_do_not_get_in(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(2)
    other, _ = scene.follow(1, "m (unified), revision of yesterday")
    shouting = socket.create_connection(("127.0.0.1", scene.port))
    shouting.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with shouting:
        while shouting.recv(1024):
            pass
    refused = Link(socket.create_connection(("127.0.0.1", scene.port), 5))
    refused.send_object(Kind.HELLO, {"rank": 9, "pod": "m-9", "identity": IDENTITY})
    kind, reason = refused.receive()
    refused.close()
    assert kind is Kind.REFUSED
    assert b"ranks 1 to 1" in reason
    right, _ = scene.follow(1)
    scene.form()
    eventually(lambda: right.formed)
    assert not other.formed


def test_who_goes_before_the_group_is_complete_may_come_again(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(3)
    early = scene.knock(1)
    eventually(lambda: scene.leader.missing == [2])
    early.close()
    eventually(lambda: scene.leader.missing == [1, 2])
    members = [scene.follow(2)[0], scene.follow(1)[0]]
    scene.form()
    eventually(lambda: all(member.formed for member in members))
    assert scene.causes.empty()


def test_a_member_that_is_gone_ends_the_group_for_everybody(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(3)
    (staying, causes), dying = scene.follow(1), scene.knock(2)
    scene.form()
    eventually(lambda: staying.formed)
    assert dying.receive()[0] is Kind.WELCOME
    dying.close()
    loss = Loss("rank 2 in pod m-2 is gone: it closed its connection")
    assert scene.causes.get(timeout=5) == loss
    assert causes.get(timeout=5) == loss
    for wait in (scene.leader.collect, staying.receive, lambda: scene.leader.send_steps({1: b"step"})):
        with pytest.raises(GroupLostError, match="rank 2 in pod m-2"):
            wait()


def test_the_better_explanation_counts(make_scene: Callable[[int], Scene]) -> None:
    """A connection that closes waits a moment for the exit status of its process."""
    scene = make_scene(2)
    dying = scene.knock(1)
    scene.form()
    dying.close()
    scene.leader.lose(Loss("rank 1 was killed by SIGKILL"))
    assert scene.causes.get(timeout=5) == Loss("rank 1 was killed by SIGKILL")
    time.sleep(0.7)
    assert scene.causes.empty()


def test_what_a_follower_says_last_is_the_cause(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(2)
    member, _ = scene.follow(1)
    scene.form()
    eventually(lambda: member.formed)
    member.blame(Loss("the device is full", "OutOfMemory"), patience=0.0)
    assert scene.causes.get(timeout=5) == Loss("rank 1 in pod m-1 failed: the device is full", "OutOfMemory")


def test_a_member_that_restarts_shows_that_its_predecessor_is_gone(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(2)
    old = scene.knock(1)
    scene.form()
    assert old.receive()[0] is Kind.WELCOME
    new = scene.knock(1)
    kind, _ = new.receive()
    assert kind is Kind.REFUSED
    assert "rank 1 in pod m-1 started anew" in scene.causes.get(timeout=5).message


def test_a_leader_that_is_gone_ends_its_followers(make_scene: Callable[[int], Scene]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    causes: Causes[Loss] = queue.SimpleQueue()
    member = GroupMember(1, pod="m-1", identity=IDENTITY, on_lost=causes.put)
    threading.Thread(target=member.meet, args=listener.getsockname()[:2], daemon=True).start()
    with listener, listener.accept()[0] as connection:
        link = Link(connection)
        link.receive()
        link.send(Kind.WELCOME, encode_object({}))
        eventually(lambda: member.formed)
        link.close()
    assert causes.get(timeout=5) == Loss("the leader is gone: it closed its connection")


def test_silence_ends_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        quiet = Link(socket.create_connection(listener.getsockname()))
        quiet.hurry(0.05)
        with pytest.raises(LinkClosedError, match="silent"):
            quiet.receive()
        quiet.close()


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
