"""Addresses and ports of this machine, IPv4 and IPv6."""

import random
import socket

# Below what Linux takes for outgoing connections (32768 and up): none of those gets a port between its choice and its use.
PORTS = range(20000, 32768)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on now, and that nobody else is likely to choose at the same time."""
    choose = random.SystemRandom().choice  # a seed that others have too would give them the same
    for _ in range(100):
        port = choose(PORTS)
        with tcp_socket(host) as s:
            try:
                s.bind((host, port))
            except OSError as error:
                problem = error
                continue
        return port
    raise problem


def tcp_socket(host: str) -> socket.socket:
    """For an address of this machine."""
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def url_host(host: str) -> str:
    """As a URL has it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def address_towards(host: str, port: int = 9) -> str:
    """The address under which `host` (a name or an address) sees this machine. Connecting a UDP socket sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as s:
        s.connect(address)
        return str(s.getsockname()[0])
