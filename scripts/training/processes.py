"""Several processes that train one model: how they find each other, what they agree on, and how one learns of the
end of another."""

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from scripts.training.config import Processes

_LEFT = b"."  # the last word of a process that ends as it should
_ending = threading.Lock()  # the first thread to end this process is the only one


def connect(asked: Processes) -> None:
    """Join the other processes of a run, before JAX's backend starts.

    Raises:
        ValueError: they can't be found.
    """
    if asked.coordinator is None:
        return
    found: dict[str, Any] = {}  # of SLURM, GKE, MPI and others, by JAX itself
    if asked.coordinator != "auto":
        names = ("coordinator_address", "num_processes", "process_id")
        found = dict(zip(names, (asked.coordinator, asked.processes, asked.process), strict=True))
    try:
        jax.distributed.initialize(**found)
    except (ValueError, RuntimeError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"coordinator: cannot join by {asked.coordinator!r}: {line}") from error


def is_first() -> bool:
    """Whether this process writes the log and the run's files."""
    return jax.process_index() == 0


def together(what: str) -> None:
    """Wait until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def any_of(number: int | None) -> int | None:
    """A signal that any of the processes has noted; None where none has."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number or 0)))) or None


def watch(asked: Processes, lost: Callable[[], object]) -> Callable[[], None]:
    """Learn at once when another process is gone: the operating system closes its socket.

    What waits for a dead process inside a collective or a barrier may wait for minutes, and JAX's runtime then ends the
    process with a stack of its own. Each process has a connection to the first; the first's end reaches all.

    Args:
        asked: where the first is found.
        lost: called in a thread of its own when another has ended without a word; then this process ends with code 1.

    Returns:
        What says that this process ends as it should.
    """
    if jax.process_count() == 1:
        return lambda: None
    peers: list[socket.socket] = []
    with socket.create_server(("", 0)) as server:
        given = (asked.coordinator or "auto").rpartition(":")[0]
        host = socket.gethostbyname(given or socket.gethostname())
        mine = np.array([*socket.inet_aton(host), server.getsockname()[1]], np.int32)
        *address, port = multihost_utils.broadcast_one_to_all(mine)
        if is_first():
            peers = [server.accept()[0] for _ in range(jax.process_count() - 1)]
        else:
            peers = [socket.create_connection((".".join(map(str, address)), int(port)))]

    def listen(peer: socket.socket) -> None:
        try:
            word = peer.recv(1)
        except OSError:
            word = b""
        if word != _LEFT:
            _ending.acquire()
            lost()
            _end(1)

    def leave() -> None:
        for peer in peers:
            peer.sendall(_LEFT)

    for peer in peers:
        threading.Thread(target=listen, args=(peer,), daemon=True).start()
    return leave


def wait_for_word_of_the_end() -> None:
    """After an error that may come of another's end: time to learn of it, which ends this process."""
    if jax.process_count() > 1:
        threading.Event().wait(5)


def _end(code: int) -> NoReturn:
    """At once: the threads of what was begun with the others would wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
