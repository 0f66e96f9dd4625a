# SPDX-License-Identifier: Apache-2.0
"""Who may call what: hosts and origins, tokens, the address of administrators, certificates."""

import contextlib
import datetime
import ipaddress
import json
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.serve import ServedModels
from terarec.serve.access import AccessControl, tls_context
from terarec.serve.http.messages import Request
from terarec.serve.http.security import Guard
from terarec.serve.protocol import ForbiddenError, UnauthenticatedError
from terarec.spec import AccessSpec, ServingSpec
from tests.errors import at
from tests.serve.conftest import TrainedRun
from tests.serve.http.serving import Served, served
from tests.serve.http.test_api_routes import INFER, MODEL, tensors
from tests.waiting import PATIENCE


def guard(*, is_loopback: bool = True, hosts: tuple[str, ...] = ()) -> Guard:
    return Guard(AccessControl(AccessSpec(), is_loopback=is_loopback), hosts)


def post(**headers: str) -> Request:
    return Request("POST", INFER, headers=headers)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", None),
        ("127.0.0.1", None),
        ("[::1]:8000", None),
        ("10.1.2.3:8000", None),
        ("LOCALHOST:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_requests_for_this_server_are_accepted(host: str, origin: str | None) -> None:
    guard().check(post(host=host, **({} if origin is None else {"origin": origin})), "use")


@pytest.mark.parametrize(
    ("host", "origin", "where"),
    [
        ("shop.example", None, "Host"),
        ("shop.example:8000", "http://shop.example:8000", "Host"),
        ("localhost.shop.example", None, "Host"),
        ("127.0.0.1.shop.example", None, "Host"),
        ("", None, "Host"),
        ("[::1", None, "Host"),
        ("localhost:8000", "http://shop.example", "Origin"),
        ("localhost:8000", "http://localhost:9000", "Origin"),
        ("localhost:8000", "null", "Origin"),
        ("localhost:8000", "", "Origin"),
        ("localhost:8000", "http://[::1", "Origin"),
    ],
)
def test_requests_of_other_sites_are_refused(host: str, origin: str | None, where: str) -> None:
    """Finding Q8: a page in a browser, also one whose name leads to this machine."""
    request = post(host=host, **({} if origin is None else {"origin": origin}))
    with pytest.raises(ForbiddenError, check=at(where, "got ")):
        guard().check(request, "use")


def test_further_names_may_be_allowed() -> None:
    request = post(host="models.example:8000")
    guard(hosts=("Models.example",)).check(request, "use")
    guard(hosts=("*",)).check(request, "use")
    with pytest.raises(ForbiddenError):
        guard(is_loopback=False).check(request, "use")
    with pytest.raises(ForbiddenError):
        guard(is_loopback=False).check(post(host="localhost"), "use")


def test_another_site_is_answered_403(models: ServedModels, trained: TrainedRun) -> None:
    body = {"inputs": tensors(trained.records(0, 1))}
    with served(models) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        for headers in ({"Host": "shop.example"}, {"Origin": "http://shop.example"}):
            answer = client.post(INFER, json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"].split(":")[0]) == (403, next(iter(headers)))
        assert client.get("/v2", headers={"Host": "shop.example"}).status_code == 200
        own = client.post(INFER, json=body, headers={"Origin": server.url})
        assert own.status_code == 200
        assert "access-control-allow-origin" not in own.headers


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[[str, str], str]:
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_tokens(models: ServedModels, trained: TrainedRun, tokens: Callable[[str, str], str]) -> None:
    spec = AccessSpec(token_file=tokens("t", "one\ntwo\n"), admin_token_file=tokens("a", "root\n"))
    body = json.dumps({"inputs": tensors(trained.records(0, 1))})
    load = "/v2/repository/models/dlrm/load"
    with served(models, ServingSpec(access=spec)) as server, httpx.Client(base_url=server.url) as client:

        def status(method: str, path: str, token: str | None) -> int:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            return client.request(method, path, content=body if path == INFER else b"", headers=headers).status_code

        for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL}/ready", "/v2", MODEL, f"{MODEL}/stats"):
            assert status("GET", path, None) == 200
        assert status("POST", "/v2/repository/index", None) == 200
        assert [status("POST", INFER, token) for token in (None, "three", "one", "two", "root")] == [
            401, 401, 200, 200, 200,
        ]  # fmt: skip
        # 503: the token is right, and the server's models are not loaded by clients.
        assert [status("POST", load, token) for token in (None, "one", "root")] == [401, 401, 503]
        refused = client.post(INFER, content=body)
        assert refused.headers["www-authenticate"] == "Bearer"


def test_an_index_needs_a_token_beyond_this_machine(tokens: Callable[[str, str], str]) -> None:
    control = AccessControl(AccessSpec(token_file=tokens("t", "one")), is_loopback=False)
    control.check("open", None)
    control.check("index", "one")
    for access in ("index", "use"):
        with pytest.raises(UnauthenticatedError):
            control.check(access, None)
    with pytest.raises(ForbiddenError):
        control.check("admin", "one")


def test_administrators_may_have_an_address_of_their_own(models: ServedModels) -> None:
    load = "/v2/repository/models/dlrm/load"
    with served(models, ServingSpec(access=AccessSpec(admin_port=0))) as server:
        assert httpx.post(f"{server.url}{load}", timeout=PATIENCE).status_code == 403
        assert httpx.post(f"http://127.0.0.1:{server.admin_port}{load}", timeout=PATIENCE).status_code == 503


def certificate(name: str, issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None) -> tuple:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key if issuer is None else issuer[1], hashes.SHA256())
    )
    return made, key


def write_pem(path: Path, made: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> str:
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(path)


def test_tls_and_certificates_of_clients(models: ServedModels, trained: TrainedRun, tmp_path: Path) -> None:
    authority = certificate("authority")
    root = write_pem(tmp_path / "root.pem", *authority)
    server_pem = write_pem(tmp_path / "server.pem", *certificate("server", authority))
    client_pem = write_pem(tmp_path / "client.pem", *certificate("client", authority))
    body = {"inputs": tensors(trained.records(0, 300))}

    def call(server: Served, client_certificate: str | None) -> int:
        context = ssl.create_default_context(cafile=root)
        if client_certificate is not None:
            context.load_cert_chain(client_certificate)
        with httpx.Client(base_url=server.url, verify=context, timeout=PATIENCE) as client:
            return client.post(INFER, json=body).status_code

    with served(models, ServingSpec(access=AccessSpec(certificate=server_pem))) as server:
        assert call(server, None) == 200
    with served(models, ServingSpec(access=AccessSpec(certificate=server_pem, client_ca=root))) as server:
        assert call(server, client_pem) == 200
        with pytest.raises(httpx.TransportError):
            call(server, None)


def test_silent_clients_of_tls_give_way_to_others(
    models: ServedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were in no limit until keys were agreed on, and held the server's open files."""
    monkeypatch.setattr("terarec.serve.http.server.most_connections", lambda: 2)
    authority = certificate("authority")
    context = ssl.create_default_context(cafile=write_pem(tmp_path / "root.pem", *authority))
    access = AccessSpec(certificate=write_pem(tmp_path / "server.pem", *certificate("server", authority)))
    question = b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with served(models, ServingSpec(access=access)) as server:
        silent = [server.connect() for _ in range(3)]
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        with context.wrap_socket(silent[2], server_hostname="127.0.0.1") as client:
            client.sendall(question)
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            # A new one counts once, and both have room.
            with context.wrap_socket(server.connect(), server_hostname="127.0.0.1") as second:
                for each in (second, client):
                    each.sendall(question)
                    assert each.recv(4096).startswith(b"HTTP/1.1 200")
                # One that is idle gives way, too.
                with context.wrap_socket(server.connect(), server_hostname="127.0.0.1") as third:
                    third.sendall(question)
                    assert third.recv(12) == b"HTTP/1.1 200"
                assert second.recv(1) == b""
        for connection in silent[:2]:
            connection.close()


def test_wrong_files_are_named(tmp_path: Path, tokens: Callable[[str, str], str]) -> None:
    with pytest.raises(ConfigError, check=at(tmp_path / "t", "got no token")):
        AccessControl(AccessSpec(token_file=tokens("t", "\n \n")), is_loopback=True)
    with pytest.raises(DataNotFoundError, check=at(tmp_path / "none")):
        AccessControl(AccessSpec(token_file=str(tmp_path / "none")), is_loopback=True)
    with pytest.raises(ConfigError, check=at(tmp_path / "c", "got no certificate")):
        tls_context(AccessSpec(certificate=tokens("c", "text")))
    with pytest.raises(FormatError, check=at(tmp_path)):
        tls_context(AccessSpec(certificate=str(tmp_path)))
    with pytest.raises(ConfigError, check=at("AccessSpec.key", "without a certificate")):
        AccessSpec(key="key.pem")
    with pytest.raises(ConfigError, check=at("AccessSpec.allowed_hosts")):
        AccessSpec(allowed_hosts=("a b",))
    assert tls_context(AccessSpec()) is None
