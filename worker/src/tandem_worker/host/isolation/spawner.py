"""The process that jobs are forked from: `python -m tandem_worker.host.isolation.spawner CONTROL_FD START_FD`.

It prepares once what all jobs need and then only forks, so it is never busy, has one thread, and a job starts within
milliseconds with the prepared state. It ends when the caller's end of the control socket closes, however the caller
ended; its jobs end with it.

A control message is a byte with two descriptors: the job's socket, and the pipe that the spawner writes the signal to
that ended the job, or 0; the job is ended when the caller closes the other end of that. On its socket a job says that
it has begun; then, call by call, it reads the seconds it has and the name of a function, and the request, and answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping

import orjson

from tandem_worker.host.isolation.contract import AnswerStatus, Function, Limits, PeerGoneError, read_frame, write_frame

SECONDS = struct.Struct("<d")
MAX_SETUP_BYTES = 1 << 30
MAX_REQUEST_BYTES = 64 << 20
_PR_SET_PDEATHSIG = 1
_OOM_FIRST = "1000"
_libc = ctypes.CDLL(None)


def main() -> None:
    """Prepare what jobs need, then fork a process for each job until the worker closes the connection.

    The command line holds the numbers of two inherited descriptors: the connection for jobs, and the one for the start,
    which brings the settings and the payload. Raises what the preparation raises, after reporting it there.
    """
    control, start = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    _, order = read_frame(start, MAX_SETUP_BYTES)
    settings = orjson.loads(order)
    _, payload = read_frame(start, MAX_SETUP_BYTES)
    _give_way(settings["niceness"])
    try:
        functions = _prepare(settings["setup"], payload)
    except BaseException as error:
        write_frame(start, AnswerStatus.RAISED, _describe(error))
        raise
    del payload, order
    gc.collect()
    gc.freeze()  # jobs must not copy pages for the sake of the collector's marks
    write_frame(start, AnswerStatus.DONE, b"")
    start.close()
    _Spawner(control, functions, Limits(**settings["limits"])).serve()
    os._exit(0)  # nothing is left to be tidied, and jobs that end now must not find half of an interpreter


def _prepare(setup: str, payload: bytes) -> Mapping[str, Function]:
    module, _, name = setup.partition(":")
    functions: Mapping[str, Function] = getattr(importlib.import_module(module), name)(payload)
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        raise RuntimeError(f"{setup} left {num_threads - 1} threads running: a fork would lose them")
    return functions


def _give_way(niceness: int) -> None:
    """Let this process be the one to go where the container runs out of memory."""
    os.nice(niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Not every sandbox has the file; the worker is then as likely to go as its child.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_FIRST)


class _Spawner:
    def __init__(self, control: socket.socket, functions: Mapping[str, Function], limits: Limits) -> None:
        self._control = control
        self._functions = functions
        self._limits = limits
        self._jobs: dict[int, int] = {}
        """Pipe of each job's process."""
        self._wakeup, wake = socket.socketpair()
        self._wakeup.setblocking(False)
        wake.setblocking(False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wakeup:
                        with contextlib.suppress(BlockingIOError):
                            self._wakeup.recv(4096)
                        self._reap(selector)
                    elif key.data is not None:
                        self._end_job(selector, key.data)
                    elif not self._take_order(selector):
                        return  # jobs end with this process: PR_SET_PDEATHSIG

    def _take_order(self, selector: selectors.BaseSelector) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._control, 1, 2)
        if not message:
            return False
        job_socket, status_pipe = descriptors
        try:
            process = os.fork()
        except OSError:  # the caller sees both ends closed and says so
            os.close(job_socket)
            os.close(status_pipe)
            return True
        if process == 0:
            _run_job(job_socket, self._functions, self._limits)
        os.close(job_socket)
        self._jobs[process] = status_pipe
        selector.register(status_pipe, selectors.EVENT_READ, process)  # "readable" when the other end closes
        return True

    def _end_job(self, selector: selectors.BaseSelector, process: int) -> None:
        """Nobody waits for its end any more, nor for its answer. Its number is its own until it is reaped."""
        if process in self._jobs:
            selector.unregister(self._jobs[process])
            os.kill(process, signal.SIGKILL)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        while self._jobs:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            pipe = self._jobs.pop(process)
            with contextlib.suppress(KeyError):  # its caller was gone before it
                selector.unregister(pipe)
            with contextlib.suppress(BrokenPipeError):  # the caller has its answer and went on
                os.write(pipe, bytes([os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0]))
            os.close(pipe)


def _run_job(descriptor: int, functions: Mapping[str, Function], limits: Limits) -> None:
    """Never returns. Exceptions become answers; the kernel ends what runs out of bounds."""
    try:
        signal.set_wakeup_fd(-1)
        _confine(descriptor, limits)
        sock = socket.socket(fileno=descriptor)
        if "warm" in functions:
            functions["warm"](b"")
        write_frame(sock, AnswerStatus.DONE, b"")  # it has begun: from here on time is the input's fault
        while True:
            _serve_call(sock, functions, limits)
    except PeerGoneError:
        pass  # the caller has no more calls for it
    finally:
        os._exit(0)


def _serve_call(sock: socket.socket, functions: Mapping[str, Function], limits: Limits) -> None:
    """Raises PeerGoneError."""
    _, head = read_frame(sock, 1024)
    signal.setitimer(signal.ITIMER_REAL, max(1e-3, SECONDS.unpack_from(head)[0]))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    _, request = read_frame(sock, MAX_REQUEST_BYTES)
    try:
        status, answer = AnswerStatus.DONE, functions[head[SECONDS.size :].decode()](request)
    except MemoryError:
        status, answer = AnswerStatus.OUT_OF_MEMORY, b""
    except BaseException as error:  # a panic of an extension in Rust is no Exception
        status, answer = AnswerStatus.RAISED, _describe(error)
    write_frame(sock, status, answer)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _confine(descriptor: int, limits: Limits) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGXCPU, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # what a client can make a library print is not for the worker's log
        os.dup2(null, standard)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, max(descriptor + 1, 1024))
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    for kind, value in (
        (resource.RLIMIT_AS, taken + limits.memory_bytes),
        (resource.RLIMIT_STACK, limits.stack_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(kind, (value, value))


def _describe(error: BaseException) -> bytes:
    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else traceback.format_exc(limit=0)
    return text.strip().encode(errors="replace")[:4096]


if __name__ == "__main__":
    main()
