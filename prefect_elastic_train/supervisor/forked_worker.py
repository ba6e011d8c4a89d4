"""The program that Ray starts in place of its worker program: has the fork server fork one, or becomes Ray's own.

It imports very little, since each worker waits for it.
"""

import json
import os
import socket
import sys

_SOCKET_VARIABLE = "PREFECT_ELASTIC_TRAIN_FORK_SERVER"
WORKER_VARIABLE = "PREFECT_ELASTIC_TRAIN_WORKER"  # path of Ray's own program
_IMPORT_SECONDS = 45.0
_FORK_SECONDS = 20.0


def request_fork(arguments: list[str]) -> None:
    """Request that the fork server forks a Ray worker in place of this process, and wait for its answer.

    Raises:
        OSError: No worker was forked.
    """
    with open("/proc/self/oom_score_adj") as file:  # set by Ray
        score = file.read()
    request = {
        "arguments": arguments,
        "environment": {**os.environ},
        "folder": os.getcwd(),
        "oom_score_adj": score,
        "python": sys.executable,
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_IMPORT_SECONDS)
        connection.connect(os.environ[_SOCKET_VARIABLE])
        if connection.recv(1) != b".":
            raise OSError
        connection.settimeout(_FORK_SECONDS)
        socket.send_fds(connection, [b"."], [0, 1, 2])
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1) != b".":
            raise OSError


if __name__ == "__main__":
    command = [os.environ[WORKER_VARIABLE], *sys.argv[1:]]
    try:
        request_fork(command)
    except OSError:
        os.execv(sys.executable, [sys.executable, *command])
