# SPDX-License-Identifier: Apache-2.0
"""Connections to Redis or Valkey, a server or a cluster: packed commands, all sent before replies are read."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from terarec.closer import Closer
from terarec.errors import MissingDependencyError, NoSpaceError, StorageError, UnreachableError
from terarec.spec import RedisSpec

_ATTEMPTS = 3  # with the cluster's nodes listed again between them


class Request(NamedTuple):
    """A command to the node of a hash.

    Attributes:
        hash: Name of the hash, which selects the node of a cluster.
        command: The command in the protocol of Redis.
    """

    hash: str
    command: bytes


def request(name: str, command: bytes, *arguments: bytes) -> Request:
    """Return a command on the hash, or other value, of a name."""
    return request_on(name, command, name.encode(), *arguments)


def request_on(name: str, *words: bytes) -> Request:
    """Return a command to the node that has the hash, or other value, of a name."""
    packed = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return Request(name, b"*%d\r\n" % len(words) + packed)


class RedisServer:
    """A server or a cluster that the tiers of many tables share. Connections are made when they are first needed."""

    def __init__(self, spec: RedisSpec) -> None:
        self.spec = spec
        self._library = _library()
        # The client has no types; replies are what the protocol of Redis carries.
        self._client: Any = None
        self._closer: Closer | None = None
        self._is_cluster = False
        self._lock = threading.Lock()

    def run(self, requests: Sequence[Request]) -> list[Any]:
        """Send all commands, then read their replies: bytes, numbers, None, or lists of these.

        Raises:
            UnreachableError: The server cannot be reached in time.
            StorageError: The server refuses a command.
        """
        library = self._library
        for attempt in range(_ATTEMPTS):
            try:
                client = self._connected()
                if attempt and self._is_cluster:
                    # A hash has moved to another node; the client follows that for its own commands alone.
                    client.nodes_manager.initialize()
                return self._run(client, requests)
            except library.exceptions.ResponseError as error:
                has_moved = isinstance(error, library.exceptions.MovedError | library.exceptions.AskError)
                if not has_moved or attempt == _ATTEMPTS - 1:
                    raise self._failed(error) from error
            # The client's error of a cluster without a node that answers is none of its `RedisError`.
            except (library.exceptions.RedisError, library.exceptions.RedisClusterException, OSError) as error:
                self._forget_nodes()
                raise self._failed(error) from error
        raise AssertionError

    @property
    def is_cluster(self) -> bool:
        """Whether it is a cluster. Errors are those of `connect`."""
        if self._client is None:
            self.connect()
        return self._is_cluster

    def connect(self) -> None:
        """Connect, unless a command has done so before; errors are those of `run`."""
        self.run(())

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            closer, self._client, self._closer = self._closer, None, None
        if closer is not None:
            closer()

    def _run(self, client: Any, requests: Sequence[Request]) -> list[Any]:
        places: dict[Any, list[int]] = {}
        for place, request in enumerate(requests):
            node = client.get_node_from_key(request.hash) if self._is_cluster else None
            places.setdefault(node, []).append(place)
        taken: list[tuple[Any, Any, list[int]]] = []
        replies: list[Any] = [None] * len(requests)
        is_read = False
        try:
            # Commands go to all nodes before a reply is read, so that the nodes work at the same time.
            # All calls take the nodes in one order: two that have the last connection of a node each would otherwise
            # wait for each other's.
            for node in sorted(places, key=lambda node: node.name) if self._is_cluster else places:
                mine = places[node]
                pool = (node.redis_connection if self._is_cluster else client).connection_pool
                connection = pool.get_connection()
                taken.append((pool, connection, mine))
                connection.send_packed_command([requests[place].command for place in mine])
            for _, connection, mine in taken:
                for place in mine:
                    replies[place] = _reply(connection, self._library)
            is_read = True
        finally:
            for pool, connection, _ in taken:
                if not is_read:  # unread replies would be taken for those of the next command
                    connection.disconnect()
                pool.release(connection)
        # Raised after all replies are read, so that the connections can be used again.
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors:
            raise errors[0]
        return replies

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
                self._closer = Closer(self, self._client.close)
            return self._client

    def _connect(self) -> Any:
        spec, library = self.spec, self._library
        options: dict[str, Any] = {
            # With a name alone, the client would send AUTH, which a server without users rejects.
            "username": None if spec.password is None and spec.user == "default" else spec.user,
            "password": spec.password,
            "socket_timeout": spec.timeout_seconds,
            "socket_connect_timeout": spec.timeout_seconds,
            # None: lookups skip a failing tier for a while; retries would make them wait for several timeouts.
            "retry": library.retry.Retry(library.backoff.NoBackoff(), 0),
            "decode_responses": False,
            **_tls_options(spec, library),
        }
        # A pool that waits: threads beyond the number of connections take turns instead of failing.
        pool_class = library.connection.BlockingConnectionPool
        options |= {"max_connections": spec.num_connections, "timeout": spec.timeout_seconds}
        last: Exception | None = None
        for host, port in spec.nodes:
            client = library.Redis(connection_pool=pool_class(host=host, port=port, **options))
            try:
                # The server reports its kind: the client has one class for clusters and another for single servers.
                self._is_cluster = int(client.info("cluster").get("cluster_enabled", 0)) == 1
                if not self._is_cluster:
                    return client
                client.close()
                nodes = [library.cluster.ClusterNode(*node) for node in spec.nodes]
                return library.cluster.RedisCluster(
                    # With a URL the class of connections is an option; the nodes are the others, too.
                    url=f"redis://{host}:{port}",
                    startup_nodes=nodes,
                    connection_pool_class=pool_class,
                    **options,
                )
            except (library.exceptions.RedisError, library.exceptions.RedisClusterException, OSError) as error:
                client.close()
                last = error
        assert last is not None
        raise last

    def _forget_nodes(self) -> None:
        """Let the next command list the nodes of a cluster again: one of them may be gone."""
        if self._is_cluster:
            self.close()

    def _failed(self, error: Exception) -> StorageError:
        where, kinds = f"redis {self.spec.address}", self._library.exceptions
        is_refused = isinstance(error, kinds.AuthenticationError)  # a ConnectionError of the client
        unreachable = kinds.ConnectionError | kinds.TimeoutError | kinds.RedisClusterException | OSError
        if isinstance(error, unreachable) and not is_refused:
            return UnreachableError(where, f"{error}, expected a server of Redis or Valkey that can be reached")
        return (NoSpaceError if isinstance(error, kinds.OutOfMemoryError) else StorageError)(where, error)


def _reply(connection: Any, library: Any) -> Any:
    try:
        return connection.read_response(disable_decoding=True)
    except library.exceptions.ResponseError as error:  # the replies to other commands follow
        return error


def _tls_options(spec: RedisSpec, library: Any) -> Mapping[str, Any]:
    tls = spec.tls
    if tls is None:
        return {}
    is_directory = Path(tls.ca_certificates).is_dir()
    options: dict[str, Any] = {
        "connection_class": _named(library, tls.server_name),
        "ssl_ca_path" if is_directory else "ssl_ca_certs": tls.ca_certificates,
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.key,
        "ssl_check_hostname": True,
    }
    return options


def _named(library: Any, server_name: str | None) -> Any:
    """Return a class of encrypted connections that compares certificates with a name, None for that of the host."""
    if server_name is None:
        return library.connection.SSLConnection

    class NamedConnection(library.connection.SSLConnection):  # type: ignore[misc]  # the client has no types
        host: Any

        def _wrap_socket_with_ssl(self, sock: Any) -> Any:
            host, self.host = self.host, server_name  # the client has no other place for the name
            try:
                return super()._wrap_socket_with_ssl(sock)
            finally:
                self.host = host

    return NamedConnection


def _library() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.cluster
        import redis.connection
        import redis.retry
    except ImportError:
        raise MissingDependencyError("redis", "not installed, expected pip install 'terarec[redis]'") from None
    return redis
