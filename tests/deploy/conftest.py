# SPDX-License-Identifier: Apache-2.0
"""A model repository, the tokens of a server, and tables in Valkey."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from terarec.apps.promotion import promote
from terarec.io.files import read_json
from terarec.spec.serving_repository import PromotionSpec
from tests.deploy import deployments as deploy
from tests.deploy.servers import ADMIN_TOKEN, TOKEN
from tests.programs import VALKEY
from tests.ps.redis_processes import running as running_redis
from tests.serve.conftest import TrainedRun, trained

__all__ = ["trained"]


@pytest.fixture(scope="session")
def models(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the model "shop", whose version 1 follows its run, and version 2 is its shadow."""
    path = tmp_path_factory.mktemp("models")
    promote(trained.path, path, "shop", PromotionSpec(follow=True))
    promote(trained.path, path, "shop", PromotionSpec(shadow=1.0))
    return path


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of tokens, by all names that they have in deploy/."""
    path = tmp_path_factory.mktemp("secrets")
    for name, token in (("token", TOKEN), ("admin-token", ADMIN_TOKEN), ("admin_token", ADMIN_TOKEN)):
        (path / name).write_text(f"{token}\n")
    return path


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Path]:
    """The tables of the Compose file, in a Valkey that runs with the options of the Compose file."""
    program, *options = deploy.read(deploy.COMPOSE)["services"]["tables"]["command"]
    assert program == "valkey-server"
    with running_redis(tmp_path / "valkey", *options, program=VALKEY) as valkey:
        spec = read_json(deploy.TABLES)
        spec["tiers"][0]["address"] = valkey.address
        path = tmp_path / "tables.json"
        path.write_text(json.dumps(spec))
        yield path
