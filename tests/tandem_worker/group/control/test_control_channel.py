"""The group's control channel over loopback: who gets in, what arrives, how it ends."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from tandem_api.keys import KeyRing
from tandem_worker.engine.errors import GroupLostError
from tandem_worker.group.control.leader import GroupLeader
from tandem_worker.group.control.link import MAX_PAYLOAD, ControlLink, LinkClosedError, Loss, MessageKind, encode_object
from tandem_worker.group.control.member import GroupMember
from tandem_worker.group.control.table import Operation, encode_call
from tandem_worker.host.errors import AuthenticationError
from tandem_worker.host.nvml import GpuSample
from tandem_worker.host.peers.dial import dial
from tandem_worker.host.peers.door import Door
from tandem_worker.host.peers.handshake import Purpose
from tandem_worker.host.vitals import Vitals

IDENTITY = "m (unified), revision r"
RING = KeyRing(primary="k1", keys={"k1": bytes(range(32))})
OTHERS = KeyRing(primary="k1", keys={"k1": bytes(32)})
Causes = queue.SimpleQueue


class Scene:
    """A leader that listens, and followers on threads."""

    def __init__(self, size: int) -> None:
        self.causes: Causes[Loss] = queue.SimpleQueue()
        self.leaving = threading.Event()
        self.vitals = Vitals()
        self.leader = GroupLeader(
            size, IDENTITY, on_lost=self.causes.put, on_leaving=self.leaving.set, ring=lambda: RING, vitals=self.vitals
        )
        self.port = self.leader.listen("127.0.0.1", 0)
        self.links: list[ControlLink] = []

    def follow(self, rank: int, identity: str = IDENTITY) -> tuple[GroupMember, Causes[Loss]]:
        causes: Causes[Loss] = queue.SimpleQueue()
        member = make_member(rank, causes, identity=identity)
        threading.Thread(target=member.meet, args=("127.0.0.1", self.port), daemon=True).start()
        return member, causes

    def connect(self) -> ControlLink:
        """Somebody with the key, who has said nothing yet."""
        link = ControlLink(dial("127.0.0.1", self.port, RING, Purpose.GROUP, seconds=60))
        self.links.append(link)
        return link

    def knock(self, rank: int, *, beats: bool = False) -> ControlLink:
        """A follower whose end the test plays itself."""
        link = self.connect()
        if beats:
            link.start_heartbeat(Vitals())
        link.send_object(MessageKind.HELLO, {"rank": rank, "pod": f"m-{rank}", "identity": IDENTITY})
        return link

    def form(self) -> None:
        self.leader.gather({"stageEnds": [7]})


def make_member(
    rank: int, causes: Causes[Loss], *, identity: str = IDENTITY, ring: KeyRing = RING, vitals: Vitals | None = None
) -> GroupMember:
    return GroupMember(
        rank, pod=f"m-{rank}", identity=identity, on_lost=causes.put, ring=lambda: ring, vitals=vitals or Vitals()
    )


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
    assert [first.receive(), second.receive()] == [(MessageKind.PLAN, b"plan")] * 2
    assert (first.receive(), second.receive()) == ((MessageKind.STEP, b"a"), (MessageKind.STEP, b"b"))
    first.leave()
    assert scene.leaving.wait(30)
    scene.leader.stop(timeout=0.1)
    assert first.receive()[0] is MessageKind.STOP
    assert causes.empty()
    assert scene.causes.empty()


def test_the_wrong_do_not_get_in(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(2)
    other, _ = scene.follow(1, "m (unified), revision of yesterday")
    refused = scene.connect()
    refused.send_object(MessageKind.HELLO, {"rank": 9, "pod": "m-9", "identity": IDENTITY})
    kind, reason = refused.receive()
    refused.close()
    assert kind is MessageKind.REFUSED
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
    assert dying.receive()[0] is MessageKind.WELCOME
    dying.close()
    loss = Loss("rank 2 in pod m-2 is gone: it closed its connection")
    assert scene.causes.get(timeout=60) == loss
    assert causes.get(timeout=60) == loss
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
    assert scene.causes.get(timeout=60) == Loss("rank 1 was killed by SIGKILL")
    time.sleep(0.7)
    assert scene.causes.empty()


def test_what_a_follower_says_last_is_the_cause(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(2)
    member, _ = scene.follow(1)
    scene.form()
    eventually(lambda: member.formed)
    member.blame(Loss("the device is full", "OutOfMemory"), patience=0.0)
    assert scene.causes.get(timeout=60) == Loss("rank 1 in pod m-1 failed: the device is full", "OutOfMemory")


def test_a_member_that_restarts_shows_that_its_predecessor_is_gone(
    make_scene: Callable[[int], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(2)
    old = scene.knock(1)
    scene.form()
    assert old.receive()[0] is MessageKind.WELCOME
    monkeypatch.setattr(
        "tandem_worker.group.control.leader._SIGN_OF_LIFE_SECONDS", 0.3
    )  # it has never sent a heartbeat
    new = scene.knock(1)
    kind, _ = new.receive()
    assert kind is MessageKind.REFUSED
    assert "rank 1 in pod m-1 started anew" in scene.causes.get(timeout=60).message


def test_a_leader_that_is_gone_ends_its_followers(make_scene: Callable[[int], Scene]) -> None:
    causes: Causes[Loss] = queue.SimpleQueue()
    member = make_member(1, causes)
    with play_leader() as (port, callers):
        threading.Thread(target=member.meet, args=("127.0.0.1", port), daemon=True).start()
        link = callers.get(timeout=60)
        link.receive()
        link.send(MessageKind.WELCOME, encode_object({}))
        eventually(lambda: member.formed)
        link.close()
    assert causes.get(timeout=60) == Loss("the leader is gone: it closed its connection")


@contextlib.contextmanager
def play_leader() -> Iterator[tuple[int, queue.SimpleQueue[ControlLink]]]:
    """A leader whose end the test plays itself: its port, and who got in."""
    listener = socket.create_server(("127.0.0.1", 0))
    callers: queue.SimpleQueue[ControlLink] = queue.SimpleQueue()
    door = Door(
        listener,
        ring=lambda: RING,
        purpose=Purpose.GROUP,
        admit=lambda sock, name: callers.put(ControlLink(sock)),
        vitals=Vitals(),
    )
    port = listener.getsockname()[1]
    door.start()
    try:
        yield port, callers
    finally:
        door.close()


def test_a_stranger_learns_nothing_and_ends_nothing(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(2)
    member, causes = scene.follow(1)
    scene.form()
    eventually(lambda: member.formed)
    hello = encode_object({"rank": 1, "pod": "m-1", "identity": IDENTITY})
    frame = len(hello).to_bytes(4, "big") + b"\x01" + hello
    for words in (frame, b"GET / HTTP/1.1\r\n\r\n" * 9, frame * 50, b"\xff" * 200):
        with socket.create_connection(("127.0.0.1", scene.port), 60) as stranger:
            stranger.sendall(words)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1000) == b""
    with pytest.raises(AuthenticationError):
        dial("127.0.0.1", scene.port, OTHERS, Purpose.GROUP, seconds=60)
    with pytest.raises(AuthenticationError):
        dial("127.0.0.1", scene.port, RING, Purpose.KV, seconds=60)
    scene.leader.send_steps({1: b"a"})
    assert member.receive() == (MessageKind.STEP, b"a")
    assert scene.causes.empty()
    assert causes.empty()
    assert scene.leader.refusals.total() == 6


def test_a_follower_with_another_key_waits_outside(make_scene: Callable[[int], Scene]) -> None:
    """Until its key is the group's, as in a rotation."""
    scene = make_scene(2)
    ring = OTHERS
    member = GroupMember(
        1, pod="m-1", identity=IDENTITY, on_lost=lambda cause: None, ring=lambda: ring, vitals=Vitals()
    )
    threading.Thread(target=member.meet, args=("127.0.0.1", scene.port), daemon=True).start()
    eventually(lambda: scene.leader.refusals["wrong_proof"] >= 1)
    assert scene.leader.missing == [1]
    ring = RING
    scene.form()
    eventually(lambda: member.formed)


@pytest.mark.parametrize("formed", [False, True])
def test_nobody_takes_the_place_of_a_rank_that_is_alive(make_scene: Callable[[int], Scene], formed: bool) -> None:
    """With the key, even."""
    scene = make_scene(2 if formed else 3)
    rightful = scene.knock(1, beats=True)
    eventually(lambda: 1 not in scene.leader.missing)
    if formed:
        scene.form()
        assert rightful.receive()[0] is MessageKind.WELCOME
    impostor = scene.knock(1)
    kind, payload = impostor.receive()
    assert kind is MessageKind.REFUSED
    assert b"rank 1 in pod m-1 is here and alive" in payload
    assert scene.causes.empty()
    if formed:
        scene.leader.send_steps({1: b"a"})
        assert rightful.receive() == (MessageKind.STEP, b"a")


def test_the_place_of_who_has_gone_silent_is_free(
    make_scene: Callable[[int], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_worker.group.control.leader._SIGN_OF_LIFE_SECONDS", 0.3)
    scene = make_scene(3)
    gone = scene.knock(1)  # a machine that vanished: no heartbeats, no end of the connection
    eventually(lambda: scene.leader.missing == [2])
    members = [scene.follow(1)[0]]
    eventually(lambda: link_ended(gone))
    members.append(scene.follow(2)[0])
    scene.form()
    eventually(lambda: all(member.formed for member in members))


@pytest.mark.parametrize(
    "kind",
    [MessageKind.REPORT, MessageKind.ANSWER, MessageKind.FAILED, MessageKind.CALL, MessageKind.STEP, MessageKind.STOP],
)
def test_before_the_group_is_complete_members_are_silent(make_scene: Callable[[int], Scene], kind: MessageKind) -> None:
    scene = make_scene(3)
    link = scene.knock(1)
    eventually(lambda: scene.leader.missing == [2])
    link.send(kind, b"{}")
    eventually(lambda: scene.leader.missing == [1, 2])
    assert scene.causes.empty()


@pytest.mark.parametrize(
    ("kind", "payload", "words"),
    [
        (MessageKind.STEP, b"", "it sent STEP, which is not expected now"),
        (MessageKind.PLAN, b"", "it sent PLAN, which is not expected now"),
        (MessageKind.CALL, b"", "cut off"),
        (MessageKind.CALL, encode_call(1, Operation.ADD, [b"k", b"x"]), "only numbers"),
        (MessageKind.HEARTBEAT, b"[]", "not an object of problems and gpu"),
        (MessageKind.HEARTBEAT, b'{"gpu": {}, "problems": 1}', "not a list of problems"),
    ],
)
def test_a_member_gone_mad_ends_its_group_with_a_reason(
    make_scene: Callable[[int], Scene], kind: MessageKind, payload: bytes, words: str
) -> None:
    scene = make_scene(2)
    link = scene.knock(1)
    scene.form()
    link.send(kind, payload)
    assert words in scene.causes.get(timeout=60).message


def test_one_report_each(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(2)
    link = scene.knock(1)
    scene.form()
    link.send(MessageKind.REPORT, b"one")
    link.send(MessageKind.REPORT, b"two")
    assert "it reported twice" in scene.causes.get(timeout=60).message


def test_knockers_with_the_key_are_bounded(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(3)
    before = threading.active_count()
    for _ in range(40):
        scene.connect()
    eventually(lambda: sum(link_ended(link) for link in scene.links) >= 34)
    assert threading.active_count() - before <= 2 * 2 * 3  # each has one that listens and one that beats
    for link in scene.links:
        link.close()
    members = [scene.follow(1)[0], scene.follow(2)[0]]
    scene.form()
    eventually(lambda: all(member.formed for member in members), 60)


def link_ended(link: ControlLink) -> bool:
    try:
        return link._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_what_is_wrong_with_a_rank_shows_at_its_leader(
    make_scene: Callable[[int], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_worker.group.control.link.HEARTBEAT_SECONDS", 0.05)
    scene = make_scene(2)
    vitals, causes = Vitals(), queue.SimpleQueue()
    vitals.read_gpu = lambda: GpuSample(vram_used_bytes=5, slowed=True)
    member = make_member(1, causes, vitals=vitals)
    threading.Thread(target=member.meet, args=("127.0.0.1", scene.port), daemon=True).start()
    scene.form()
    vitals.set("kv port 7001", "is gone")
    eventually(lambda: scene.vitals.problems() == ["rank 1 in pod m-1: kv port 7001: is gone"])
    assert scene.leader.gpus == {1: GpuSample(vram_used_bytes=5, slowed=True)}
    vitals.clear("kv port 7001")
    eventually(lambda: scene.vitals.problems() == [])


def test_a_member_without_a_thread_is_refused_and_leaves_nothing(
    make_scene: Callable[[int], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(2)
    known = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in {"group-member", "heartbeat"}:
            raise RuntimeError("can't start new thread")
        known(thread)

    member, _ = scene.follow(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        link = scene.connect()
        eventually(lambda: link_ended(link))
        eventually(lambda: any("cannot be started" in problem for problem in scene.vitals.problems()))
    scene.form()
    eventually(lambda: member.formed)


def test_a_listener_that_fails_ends_the_group(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(2)
    member, _ = scene.follow(1)

    def fail(message: bytes) -> None:
        raise ZeroDivisionError("a defect")

    scene.leader.on_answer = fail
    scene.form()
    eventually(lambda: member.formed)
    member.answer(b"x")
    assert "not listened to any more: ZeroDivisionError: a defect" in scene.causes.get(timeout=60).message


def test_ranks_find_each_other_in_the_leaders_table(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(3)
    (first, _), (second, _) = scene.follow(1), scene.follow(2)
    scene.form()
    eventually(lambda: first.formed and second.formed)
    found: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(first.call(Operation.GET, [b"k"], seconds=60))).start()
    threading.Thread(target=lambda: found.put(scene.leader.call(Operation.GET, [b"k"], seconds=60))).start()
    assert second.call(Operation.SET, [b"k", b"v" * 100_000], seconds=60) == b""
    assert [found.get(timeout=60) for _ in range(2)] == [b"v" * 100_000] * 2
    assert [who.call(Operation.ADD, [b"n", b"1"], seconds=60) for who in (first, second, scene.leader)] == [
        b"1", b"2", b"3",
    ]  # fmt: skip
    with pytest.raises(TimeoutError):
        first.call(Operation.GET, [b"never"], seconds=0.1)


def test_who_waits_in_the_table_is_told_when_the_group_ends(make_scene: Callable[[int], Scene]) -> None:
    scene = make_scene(2)
    member, _ = scene.follow(1)
    scene.form()
    eventually(lambda: member.formed)
    errors: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait(who: GroupMember | GroupLeader) -> None:
        try:
            who.call(Operation.WAIT, [b"never"], seconds=30)
        except GroupLostError as error:
            errors.put(str(error))

    for who in (member, scene.leader):
        threading.Thread(target=wait, args=(who,), daemon=True).start()
    time.sleep(0.2)
    scene.leader.lose(Loss("rank 1 was killed by SIGKILL"))
    assert [errors.get(timeout=60) for _ in range(2)] == ["rank 1 was killed by SIGKILL"] * 2


def pair_of_links() -> tuple[socket.socket, ControlLink]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, ControlLink(listener.accept()[0])


@pytest.mark.parametrize("kind", MessageKind)
def test_sizes_are_refused_before_anything_is_read(kind: MessageKind) -> None:
    raw, link = pair_of_links()
    with raw:
        raw.sendall((MAX_PAYLOAD[kind] + 2).to_bytes(4, "big") + bytes([kind]))
        with pytest.raises(LinkClosedError, match=f"it sent {kind.name} of"):
            link.receive()
    link.close()


def test_room_is_made_as_bytes_arrive() -> None:
    """Announced: 256 MiB; sent: 100 KB."""
    raw, link = pair_of_links()
    with raw:
        raw.sendall((MAX_PAYLOAD[MessageKind.STEP] + 1).to_bytes(4, "big") + bytes([MessageKind.STEP]) + bytes(100_000))
        tracemalloc.start()
        link.hurry(0.3)
        with pytest.raises(LinkClosedError, match="silent"):
            link.receive()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    link.close()
    assert peak < 1 << 20


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 1_000_000])
def test_frames_of_every_size_arrive(size: int) -> None:
    raw, link = pair_of_links()
    payload = bytes(index % 251 for index in range(size))
    with raw:
        sender = threading.Thread(
            target=raw.sendall, args=((size + 1).to_bytes(4, "big") + bytes([MessageKind.STEP]) + payload,)
        )
        sender.start()
        assert link.receive() == (MessageKind.STEP, payload)
        sender.join(30)
    link.close()


def test_a_frame_that_drips_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_worker.group.control.link.SILENCE_SECONDS", 0.3)
    raw, link = pair_of_links()
    stop = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            raw.sendall((1000).to_bytes(4, "big") + bytes([MessageKind.STEP]))
            while not stop.wait(0.05):
                raw.sendall(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(LinkClosedError, match="not complete after"):
        link.receive()
    stop.set()
    dripping.join(30)
    raw.close()
    link.close()


def test_silence_ends_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        quiet = ControlLink(socket.create_connection(listener.getsockname()))
        quiet.hurry(0.05)
        with pytest.raises(LinkClosedError, match="silent"):
            quiet.receive()
        quiet.close()


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
