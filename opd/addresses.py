"""What a teacher's address may be: read before a socket is, since libzmq takes a wrong port and then waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

from opd.errors import ConfigError

MAX_PORT = 65_535


def parse_addresses(addresses: Sequence[str] | str) -> list[str]:
    """The addresses of all replicas, at least one; a string may hold several, separated by commas.

    Raises:
        ConfigError: none, one twice, or one that is no tcp://host:port and no ipc://path.
    """
    parts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    found = [part.strip() for part in parts if part.strip()]
    if not found:
        raise ConfigError("no teacher address was given; write tcp://host:port")
    for address in found:
        _check(address)
    if len(set(found)) != len(found):
        raise ConfigError(f"a teacher address is there twice: {', '.join(found)}")
    return found


def _check(address: str) -> None:
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("tcp", "ipc"):
        raise ConfigError(f"teacher address {address!r} has no scheme; write tcp://{rest or address}")
    if scheme == "ipc":
        return
    host, _, port = rest.rpartition(":")
    if not host:
        raise ConfigError(f"teacher address {address!r} has no port; write tcp://host:port")
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= MAX_PORT):
        raise ConfigError(f"teacher address {address!r} has the port {port!r}; ports go from 1 to {MAX_PORT}")
