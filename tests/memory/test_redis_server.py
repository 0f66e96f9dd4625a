# SPDX-License-Identifier: Apache-2.0
"""What `RedisServer` uses of redis-py beside its documented interface is there; `pyproject.toml` bounds the version."""

import inspect
import tomllib
from pathlib import Path

import pytest

redis = pytest.importorskip("redis")
cluster = pytest.importorskip("redis.cluster")
connection = pytest.importorskip("redis.connection")

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_version_of_the_client_has_an_upper_bound() -> None:
    (requirement,) = [
        text
        for text in tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["redis"]
        if text.startswith("redis>")
    ]
    lower, upper = (int(bound.strip("redis<>=").split(".")[0]) for bound in requirement.split(","))
    assert lower <= int(redis.__version__.split(".")[0]) < upper


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (cluster.RedisCluster, "get_node_from_key", {"key"}),
        (cluster.NodesManager, "initialize", set()),
        (connection.BlockingConnectionPool, "get_connection", set()),
        (connection.BlockingConnectionPool, "release", {"connection"}),
        (connection.Connection, "send_packed_command", {"command"}),
        (connection.Connection, "read_response", {"disable_decoding"}),
        (connection.Connection, "disconnect", set()),
        (connection.SSLConnection, "_wrap_socket_with_ssl", {"sock"}),
    ],
)
def test_the_client_has_each_method(owner: type, name: str, parameters: set[str]) -> None:
    assert parameters <= inspect.signature(getattr(owner, name)).parameters.keys()


def test_the_client_has_each_attribute() -> None:
    node = cluster.ClusterNode("127.0.0.1", 6379)
    assert node.redis_connection is None  # a client, once the cluster has listed its nodes
    assert "self.nodes_manager" in inspect.getsource(cluster.RedisCluster.__init__)
    assert redis.Redis().connection_pool is not None
