"""The address that the server listens on."""

import socket

from treespec.errors import InputError

BACKLOG = 128  # connections that the system keeps until they are accepted


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InputError for an address that cannot be had.

    port: 0 takes a free one.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        own = socket.socket(family, socket.SOCK_STREAM)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
        own.listen(BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"cannot listen on {host}, port {port}: {reason}; name others by --host and --port"
        ) from error
    return own
