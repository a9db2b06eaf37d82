"""Processes meet here before `jax.distributed` connects them.

`jax.distributed.initialize` ends in a native abort when a peer is missing. So process 0 first
listens on the coordinator's port, every other process says hello, and only when all have arrived
does process 0 answer "go" and free the port for jax. Whoever waits in vain knows for whom.
"""

import contextlib
import json
import select
import socket
import time
from typing import Any

from mtjax.config.check import RunError

_RETRY_S = 0.2
_HELLO_TIMEOUT_S = 5.0
# A peer waits this much longer than process 0, to hear from it who was missing.
_GRACE_S = 5.0


class PeerError(RunError):
    """Not all processes of the run came together; the text names who is missing or wrong."""


def meet(coordinator: str, num_processes: int, process_id: int, timeout_s: float) -> None:
    """Returns when all processes have arrived. Raises PeerError after `timeout_s` seconds."""
    me = f"process {process_id} of {num_processes}"
    host, _, port = coordinator.rpartition(":")
    deadline_s = time.monotonic() + timeout_s
    if process_id == 0:
        others = _listed(set(range(1, num_processes)))
        print(f"{me} waits at {coordinator} for {others}, up to {timeout_s:.0f} s", flush=True)
        _host(me, coordinator, int(port), num_processes, deadline_s, timeout_s)
    else:
        print(
            f"{me} waits for process 0 at {coordinator}, up to {timeout_s:.0f} s",
            flush=True,
        )
        _join(me, (host.strip("[]"), int(port)), _hello(num_processes, process_id), deadline_s)


def _hello(num_processes: int, process_id: int) -> dict[str, Any]:
    import jax

    return {"id": process_id, "of": num_processes, "jax": jax.__version__}


def _host(
    me: str, coordinator: str, port: int, num_processes: int, deadline_s: float, timeout_s: float
) -> None:
    peers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(me, port))
        problem = ""
        while len(peers) < num_processes - 1 and not problem:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([server], [], [], left_s)[0]:
                missing = _listed(set(range(1, num_processes)) - peers.keys())
                problem = (
                    f"{me}: {missing} did not arrive at {coordinator} within {timeout_s:.0f} s. "
                    "Check that each was started with the same run.distributed.coordinator and "
                    "num_processes and its own process_id, and that the port is open; or raise "
                    "--run.distributed.timeout_s"
                )
                break
            connection, address = server.accept()
            stack.enter_context(connection)
            hello = _read_hello(connection)
            if hello is None:
                continue  # a health check or a port scan, not one of ours
            problem = _refuse(me, hello, address[0], peers, num_processes)
            if not problem:
                peers[hello["id"]] = connection
            else:
                _send(connection, {"error": problem})
        answer = {"error": problem} if problem else {"go": True}
        for connection in peers.values():
            _send(connection, answer)
    if problem:
        raise PeerError(problem)


def _listen(me: str, port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise PeerError(
            f"{me} can't listen on port {port} ({error.strerror}): another program, or another "
            "process 0, has it. Choose another port in --run.distributed.coordinator"
        ) from error


def _read_hello(connection: socket.socket) -> dict[str, Any] | None:
    connection.settimeout(_HELLO_TIMEOUT_S)
    hello = _receive(connection)
    ok = hello is not None and all(isinstance(hello.get(key), int) for key in ("id", "of"))
    return hello if ok else None


def _refuse(
    me: str, hello: dict[str, Any], address: str, peers: dict[int, Any], num_processes: int
) -> str:
    """Why the process that said `hello` does not belong here; empty if it does."""
    import jax

    who = f"{me}: a process at {address} says it is process {hello['id']} of {hello['of']}"
    if hello["of"] != num_processes:
        return f"{who}: give all processes the same run.distributed.num_processes"
    if not 0 < hello["id"] < num_processes or hello["id"] in peers:
        return f"{who}, a number already taken: give each its own run.distributed.process_id"
    if hello.get("jax") != jax.__version__:
        return (
            f"{who} with jax {hello.get('jax')}, while process 0 has jax {jax.__version__}: "
            "install the same version everywhere"
        )
    return ""


def _join(me: str, address: tuple[str, int], hello: dict[str, Any], deadline_s: float) -> None:
    reason = "no answer"
    started_s = time.monotonic()
    while time.monotonic() < deadline_s:
        try:
            left_s = max(deadline_s - time.monotonic(), _RETRY_S)
            with socket.create_connection(address, timeout=left_s) as connection:
                _send(connection, hello)
                connection.settimeout(left_s + _GRACE_S)
                answer = _receive(connection)
        except OSError as error:
            reason, answer = error.strerror or str(error), None
        if answer is not None and answer.get("go"):
            return
        if answer is not None and "error" in answer:
            raise PeerError(f"{me}: process 0 gave up: {answer['error']}")
        time.sleep(_RETRY_S)
    raise PeerError(
        f"{me}: process 0 did not answer at {address[0]}:{address[1]} within "
        f"{time.monotonic() - started_s:.0f} s ({reason}). Check that process 0 runs there and "
        "that the port is open from this host; or raise --run.distributed.timeout_s"
    )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    # A peer that left has nobody to tell.
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """One JSON object, or None at the end of the stream or for anything else."""
    try:
        with connection.makefile("rb") as stream:
            message = json.loads(stream.readline(4096))
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _listed(ids: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ids)[:16]))
    more = f" and {len(ids) - 16} more" if len(ids) > 16 else ""
    return f"process{'es' if len(ids) > 1 else ''} {shown}{more}"
