"""TLS and API tokens over real sockets, and the rule of who may listen without them."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
import trustme

from serving.client import PredictClient
from serving.credentials import Credentials
from serving.errors import ConfigInvalid, NotAllowed, ServerUnavailable
from serving.rest_client import RestPredictClient
from serving.server.app import ModelServer
from serving.server.auth import Tokens, check_exposure, tokens_of
from serving.server.flags import Options, parse
from serving.server.protos import HealthCheckRequest
from serving.server.tls import Tls

TOKEN, OTHER = "a-token-of-twenty-or-more", "another-token-that-is-good"


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def certificates(authority, tmp_path):
    """PEM files of the server and of a client, and of who signed both."""

    def write(name, *hosts):
        pair = authority.issue_cert(*hosts)
        pair.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        (tmp_path / f"{name}.crt").write_bytes(b"".join(p.bytes() for p in pair.cert_chain_pems))

    write("server", "127.0.0.1", "localhost")
    write("client", "client.example")
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    return tmp_path


def _ssl_config(folder: Path, *, client_verify=False, inline=False) -> Path:
    def value(name):
        return (folder / name).read_text() if inline else name

    lines = [
        f"server_key: {json.dumps(value('server.key'))}",
        f"server_cert: {json.dumps(value('server.crt'))}",
    ]
    if client_verify:
        lines += [f"custom_ca: {json.dumps(value('ca.crt'))}", "client_verify: true"]
    path = folder / "ssl.config"
    path.write_text("\n".join(lines))
    return path


def _tokens(path: Path, *tokens: str) -> Path:
    path.write_text("\n".join(["# for the test", *tokens, ""]))
    path.chmod(0o600)
    return path


def _both(server, scheme="http", **credentials):
    own = Credentials(**credentials)
    return (
        PredictClient(f"127.0.0.1:{server.port}", "digits", credentials=own, timeout=20),
        RestPredictClient(f"{scheme}://127.0.0.1:{server.rest_port}", "digits", credentials=own, timeout=20),
    )


def test_tls_on_both_ports(start_server, make_config, base_path, images, certificates):
    """As TF Serving has it: PEM within the config file; a plain client gets nowhere."""
    server = start_server(
        make_config(digits=(base_path, 1, {"stable": 1})),
        ssl_config_file=_ssl_config(certificates, inline=True),
    )
    for client in _both(server, "https", ca_file=certificates / "ca.crt"):
        assert client.predict({"image": images})["classes"].shape == (4,)
    plain, plain_rest = _both(server)
    for client in (plain, plain_rest, _both(server, "https")[1]):
        with pytest.raises(ServerUnavailable):
            client.predict({"image": images})
    plain.close()


def test_clients_must_show_their_certificate_where_it_is_verified(
    start_server, make_config, base_path, images, certificates
):
    server = start_server(
        make_config(digits=(base_path, 1, {"stable": 1})),
        ssl_config_file=_ssl_config(certificates, client_verify=True),
    )
    known = {
        "ca_file": certificates / "ca.crt",
        "cert_file": certificates / "client.crt",
        "key_file": certificates / "client.key",
    }
    for client in _both(server, "https", **known):
        assert client.predict({"image": images})["classes"].shape == (4,)
    for client in _both(server, "https", ca_file=certificates / "ca.crt"):
        with pytest.raises(ServerUnavailable):
            client.predict({"image": images})


def test_renewed_certificates_are_used_without_a_restart(certificates, authority, until):
    tls = Tls(_ssl_config(certificates), watch_s=0.05)
    first = tls._pems
    (certificates / "server.crt").write_text("-----BEGIN CERTIFICATE-----\nhalf of")
    until(lambda: not tls._watcher.is_alive() or tls._pems is first)
    pair = authority.issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(certificates / "server.key")
    (certificates / "server.crt").write_bytes(b"".join(p.bytes() for p in pair.cert_chain_pems))
    until(lambda: tls._pems.cert == pair.cert_chain_pems[0].bytes())
    tls.close()
    tls._watcher.join(10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server_key: 'server.key'", "must have a server_cert"),
        ("server_key: 'none' server_cert: 'server.crt'", "PEM or the path of a PEM file"),
        ("server_key: 'ssl.config' server_cert: 'server.crt'", "not PEM"),
        ("server_key: 'client.key' server_cert: 'server.crt'", "can't be used"),
        ("server_key: 'server.key' server_cert: 'server.crt' client_verify: true", "without a custom_ca"),
        ("server_kee: 'x'", "is no SSLConfig at line 1"),
    ],
)
def test_wrong_ssl_configs_say_what_is_wrong_and_quote_no_key(certificates, text, message):
    path = certificates / "ssl.config"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match=message) as caught:
        Tls(path)
    assert "PRIVATE" not in str(caught.value)


def test_tokens_on_both_ports(start_server, make_config, base_path, images, tmp_path):
    file = _tokens(tmp_path / "tokens", TOKEN, OTHER)
    server = start_server(make_config(digits=(base_path, 1, {"stable": 1})), api_token_file=file)
    for token in (TOKEN, OTHER):
        for client in _both(server, token_file=_tokens(tmp_path / "mine", token)):
            assert client.predict({"image": images})["classes"].shape == (4,)
            assert client.status()[1].available
    for credentials, message in (
        ({}, "An API token is needed"),
        ({"token_file": _tokens(tmp_path / "wrong", TOKEN + "x")}, "The API token is not valid"),
    ):
        for client in _both(server, **credentials):
            with pytest.raises(NotAllowed, match=message):
                client.predict({"image": images})
            with pytest.raises(NotAllowed, match=message):
                client.status()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{server.rest_port}/v1/models/digits", timeout=20)
    assert (caught.value.code, caught.value.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert "An API token is needed" in json.loads(caught.value.read())["error"]
    caught.value.close()


def test_only_an_admins_token_changes_what_is_served(start_server, make_config, base_path, images, tmp_path):
    config = make_config(digits=(base_path, 1, {"stable": 1}))
    server = start_server(
        config,
        api_token_file=_tokens(tmp_path / "tokens", TOKEN),
        admin_token_file=_tokens(tmp_path / "admins", OTHER),
    )
    user, admin = (
        PredictClient(
            f"127.0.0.1:{server.port}",
            "digits",
            credentials=Credentials(token_file=_tokens(tmp_path / name, token)),
        )
        for name, token in (("user", TOKEN), ("admin", OTHER))
    )
    with user, admin:
        for client in (user, admin):
            assert client.predict({"image": images})["classes"].shape == (4,)
        with pytest.raises(NotAllowed, match="needs an admin token"):
            user.reload(config)
        admin.reload(config)
    for client in _both(server, token_file=_tokens(tmp_path / "rest", OTHER)):
        assert client.status()[1].available


def test_admins_without_others_are_refused(tmp_path):
    with pytest.raises(ConfigInvalid, match="--admin_token_file needs --api_token_file"):
        tokens_of(None, ("health",), _tokens(tmp_path / "admins", OTHER))


def _health(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return channel.unary_unary("/grpc.health.v1.Health/Check")(HealthCheckRequest().SerializeToString())


def _metrics(port, **headers):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/monitoring/prometheus/metrics", headers=headers
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.status


def test_health_and_metrics_do_without_a_token_where_they_are_told_to(
    start_server, make_config, base_path, tmp_path
):
    config, file = make_config(digits=(base_path, 1, {})), _tokens(tmp_path / "tokens", TOKEN)
    server = start_server(config, api_token_file=file)
    assert _health(server.port)
    with pytest.raises(urllib.error.HTTPError) as caught:
        _metrics(server.rest_port)
    caught.value.close()
    assert _metrics(server.rest_port, Authorization=f"bearer {TOKEN}") == 200
    server = start_server(config, api_token_file=file, api_token_exempt=("metrics",))
    assert _metrics(server.rest_port) == 200
    with pytest.raises(grpc.RpcError) as refused:
        _health(server.port)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_signatures_do_without_a_token_where_they_are_told_to_and_predictions_never(
    start_server, make_config, base_path, tmp_path
):
    config, file = make_config(digits=(base_path, 1, {"stable": 1})), _tokens(tmp_path / "tokens", TOKEN)
    server = start_server(config, api_token_file=file, api_token_exempt=("metadata",))
    model = f"http://127.0.0.1:{server.rest_port}/v1/models/digits"
    with urllib.request.urlopen(f"{model}/labels/stable/metadata", timeout=20) as answer:
        assert answer.status == 200
    refused = (
        urllib.request.Request(f"{model}/metadata", b"{}"),
        f"{model}/labels/stable",
        urllib.request.Request(f"{model}:predict", b"{}"),
        f"{model}/labels/other/metadata/more",
    )
    for request in refused:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=20)
        assert caught.value.code == 401
        caught.value.close()


def test_a_changed_token_file_is_read_again_and_a_bad_one_is_not_taken_over(tmp_path, caplog):
    now = [0.0]
    file = _tokens(tmp_path / "tokens", TOKEN)
    tokens = Tokens(file, clock=lambda: now[0])
    _tokens(file, OTHER, "and-a-third-token-too")
    assert tokens.refusal(f"Bearer {TOKEN}") is None, "not looked at every time"
    now[0] = 2.0
    assert tokens.refusal(f"Bearer {TOKEN}") is not None
    assert tokens.refusal(f"Bearer {OTHER}") is None
    file.write_text("short")
    now[0] = 4.0
    assert tokens.refusal(f"Bearer {OTHER}") is None
    assert "stay in force" in caplog.text
    file.unlink()
    now[0] = 6.0
    assert tokens.refusal(f"Bearer {OTHER}") is None
    assert OTHER not in caplog.text


@pytest.mark.parametrize("header", [None, "", "Basic abc", "Bearer", b"Bearer \xff", f"Token {TOKEN}", TOKEN])
def test_headers_that_are_no_token(tmp_path, header):
    assert Tokens(_tokens(tmp_path / "tokens", TOKEN)).refusal(header) is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "one token a line, got none"), ("# only words\n", "got none"), ("short\n", "16 or more")],
)
def test_bad_token_files_are_told_at_the_start(tmp_path, content, message):
    (tmp_path / "tokens").write_text(content)
    with pytest.raises(ConfigInvalid, match=message):
        Tokens(tmp_path / "tokens")
    with pytest.raises(ConfigInvalid, match="can't be read"):
        Tokens(tmp_path / "none")
    with pytest.raises(ConfigInvalid, match="api_token_exempt must be of"):
        Tokens(_tokens(tmp_path / "good", TOKEN), ("status",))


def test_a_token_file_that_others_can_read_is_warned_of(tmp_path, caplog):
    file = _tokens(tmp_path / "tokens", TOKEN)
    file.chmod(0o644)
    Tokens(file)
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_is_served_as_it_is(host):
    check_exposure(host, tls=False, authenticated=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_other_addresses_want_tls_and_tokens(host):
    with pytest.raises(
        ConfigInvalid, match=r"needs --ssl_config_file and --api_token_file.*--allow_insecure_host"
    ):
        check_exposure(host, tls=False, authenticated=False, insecure=False)
    with pytest.raises(ConfigInvalid, match="needs --api_token_file"):
        check_exposure(host, tls=True, authenticated=False, insecure=False)
    check_exposure(host, tls=True, authenticated=True, insecure=False)
    check_exposure(host, tls=False, authenticated=False, insecure=True)


def test_a_server_refuses_to_be_exposed(tmp_path):
    config = tmp_path / "models.config"
    config.write_text("model_config_list {}")
    with pytest.raises(ConfigInvalid, match="can be reached from other machines"):
        ModelServer(Options(host="0.0.0.0", port=0, model_config_file=config))


def test_credentials_of_the_environment(certificates, tmp_path):
    mine = _tokens(tmp_path / "mine", TOKEN)
    given = {"TRAINYARD_SERVING_CA": str(certificates / "ca.crt"), "TRAINYARD_SERVING_TOKEN_FILE": str(mine)}
    credentials = Credentials.from_environment(given)
    assert credentials.tls
    assert credentials.metadata() == (("authorization", f"Bearer {TOKEN}"),)
    assert isinstance(credentials.ssl_context(), ssl.SSLContext)
    assert TOKEN not in repr(credentials)
    empty = Credentials.from_environment({"TRAINYARD_SERVING_CA": ""})
    assert empty == Credentials()
    assert empty.metadata() == ()
    for wrong in (
        {"key_file": mine},
        {"key_file": mine, "cert_file": mine},
    ):
        with pytest.raises(ConfigInvalid):
            Credentials(**wrong)
    with pytest.raises(ConfigInvalid, match="can't be read"):
        Credentials(token_file=Path("/none")).token()
    with pytest.raises(ConfigInvalid, match="must hold a token"):
        Credentials(token_file=Path(os.devnull)).token()
    with pytest.raises(ConfigInvalid, match="certificates of the client"):
        Credentials(ca_file=mine).ssl_context()


def test_flags(tmp_path):
    base = ["--model_base_path=/m"]
    options = parse([*base, "--ssl_config_file=s", "--api_token_file=t", "--api_token_exempt=health,metrics"])
    assert (options.ssl_config_file, options.api_token_file) == (Path("s"), Path("t"))
    assert options.api_token_exempt == ("health", "metrics")
    assert parse([*base, "--api_token_exempt="]).api_token_exempt == ()
