"""The program that Ray starts in place of its worker program: has the fork server fork one, or becomes Ray's own.

It imports very little, since each worker waits for it.
"""

import os
import socket
import sys

_SOCKET_VARIABLE = "PREFECT_ELASTIC_TRAIN_FORK_SERVER"
WORKER_VARIABLE = "PREFECT_ELASTIC_TRAIN_WORKER"  # path of Ray's own program
_FORK_SECONDS = 60.0  # the first worker waits for the imports of the fork server


def request_fork() -> None:
    """Request a forked Ray worker in place of this process from the fork server, and wait for the worker's answer.

    Raises:
        OSError: No worker was forked.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_FORK_SECONDS)
        connection.connect(os.environ[_SOCKET_VARIABLE])
        if not connection.recv(1):
            raise OSError


if __name__ == "__main__":
    try:
        request_fork()
    except OSError:
        os.execv(sys.executable, [sys.executable, os.environ[WORKER_VARIABLE], *sys.argv[1:]])
