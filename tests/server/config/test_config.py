"""The configuration: precedence, refused values and their errors, and that it can be printed and read."""

import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect, structs

from agentflow.cli.operating.serve import _known_names
from agentflow.engine.grammar.compiler.messages import CompileLimits
from agentflow.engine.options import EngineOptions
from agentflow.engine.scheduling.defaults import PolicyName
from agentflow.engine.scheduling.scheduler import POLICIES
from agentflow.errors import BadArgument
from agentflow.server.config.config import Effective, Flags, config_text, load_config
from agentflow.server.config.limits import HttpLimits, ServerLimits
from agentflow.server.config.schema import (
    API_SETTINGS,
    SECTIONS,
    ModelConfig,
    ServeConfig,
    all_settings,
    model_settings,
    shared_names,
)
from agentflow.server.origin_guard import accept_hosts


def loaded(
    *,
    environment: dict[str, str] | None = None,
    models: tuple[str, ...] = (),
    file: Path | None = None,
    **flags,
) -> Effective:
    path = None if file is None else str(file)
    return load_config(Flags(flags, models, path), environment or {})


def refusal(**arguments) -> str:
    with pytest.raises(BadArgument) as refused:
        loaded(**arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def file(tmp_path):
    """Writes a configuration file."""

    def write(text: str) -> Path:
        path = tmp_path / "server.toml"
        path.write_text(text)
        return path

    return write


def test_a_flag_comes_before_a_variable_a_variable_before_the_file_and_the_file_before_the_default(file):
    path = file("[network]\nport = 3\n[limits]\nmax_n = 3\n[overload]\ndrain_s = 3\n")
    environment = {"AGENTFLOW_SERVE_PORT": "2", "AGENTFLOW_SERVE_MAX_N": "2"}
    found = loaded(environment=environment, file=path, port="1")
    assert found.config.network.port == 1
    assert found.config.http_limits.max_n == 2
    assert found.config.overload.drain_s == 3
    assert found.config.overload.max_wait_s == 60
    names = ("port", "max_n", "drain_s", "max_wait_s")
    assert [found.sources[name] for name in names] == [
        "flag --port",
        "environment AGENTFLOW_SERVE_MAX_N",
        f"file {path}",
        "default",
    ]


def test_an_empty_variable_says_nothing():
    found = loaded(environment={"AGENTFLOW_SERVE_PORT": "", "AGENTFLOW_SERVE_DEVICE": ""})
    assert found.config == ServeConfig(models=(ModelConfig(name="smollm2-135m", path="smollm2-135m"),))


def test_a_variable_names_the_file(file):
    path = file("[network]\nport = 3\n")
    assert loaded(environment={"AGENTFLOW_SERVE_CONFIG": str(path)}).config.network.port == 3


def test_lists_come_from_repeated_flags_and_from_variables_with_commas():
    assert loaded(cors_origins=["https://a", "https://b,c"]).config.network.cors_origins == (
        "https://a",
        "https://b,c",
    )
    found = loaded(environment={"AGENTFLOW_SERVE_CORS_ORIGIN": "https://a, https://b,"})
    assert found.config.network.cors_origins == ("https://a", "https://b")


def test_a_switch_of_the_file_can_be_turned_by_a_flag(file):
    path = file("[engine]\ncache = false\n")
    assert not loaded(file=path).config.models[0].cache
    found = loaded(file=path, cache=True)
    assert found.config.models[0].cache
    assert found.sources["cache"] == "flag --cache"
    assert loaded(cache=False).sources["cache"] == "flag --no-cache"


def test_f25d_a_model_may_have_several_names(file):
    [model] = loaded(models=["big=/models/big"], served_model_names=["gpt-4o", "default"]).config.models
    assert (model.name, model.aliases, model.path) == ("gpt-4o", ("default",), "/models/big")
    [model] = loaded(environment={"AGENTFLOW_SERVE_SERVED_MODEL_NAME": "gpt-4o"}).config.models
    assert (model.name, model.aliases, model.path) == ("gpt-4o", (), "smollm2-135m")
    found = loaded(file=file('[models.big]\naliases = ["a", "b"]\n[models.small]\n'))
    assert [(model.name, model.aliases) for model in found.config.models] == [
        ("big", ("a", "b")),
        ("small", ()),
    ]
    again = loaded(file=file(config_text(found)))
    assert again.config == found.config


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ('[models.big]\naliases = ["small"]\n[models.small]\n', {}, "'small'"),
        ('[models.big]\naliases = ["a", "a"]\n', {}, "'a'"),
        ("[models.big]\n[models.small]\n", {"served_model_names": ["a"]}, "served_model_names"),
    ],
)
def test_f25d_names_are_of_one_model(file, text, flags, says):
    assert says in refusal(file=file(text), **flags)


def test_a_models_own_table_comes_before_what_holds_for_all(file):
    path = file('[engine]\nthreads = 2\n[models.big]\npath = "/models/big"\nthreads = 7\n[models.small]\n')
    big, small = loaded(file=path, threads="3", kv_tokens="5").config.models
    assert (big.name, big.path, big.threads, big.kv_tokens) == ("big", "/models/big", 7, 5)
    assert (small.name, small.path, small.threads, small.kv_tokens) == ("small", "small", 3, 5)


def test_the_first_source_that_has_models_decides(file):
    path = file("[models.a]\nthreads = 7\n[models.b]\n")
    found = loaded(file=path, models=("c=/x=y", "a"), environment={"AGENTFLOW_SERVE_MODEL": "b"})
    assert [(one.name, one.path, one.threads) for one in found.config.models] == [
        ("c", "/x=y", None),
        ("a", "a", 7),
    ]
    assert found.models_source == "flag --model"
    found = loaded(file=path, environment={"AGENTFLOW_SERVE_MODEL": "b,./folder/"})
    assert [(one.name, one.path) for one in found.config.models] == [("b", "b"), ("folder", "./folder/")]


def test_settings_of_ray_without_it_are_known():
    given = {"ray_address": "head:6379", "replica_cpus": "8"}
    assert loaded(**given).config.cluster.unused == ["ray_address", "replica_cpus"]
    assert loaded(**given, cluster="ray").config.cluster.unused == []


def test_engine_options_are_those_of_the_model():
    model = loaded(max_running="3", cache=False, threads="2", models=("a=/b",)).config.models[0]
    assert model.engine_options() == EngineOptions("/b", max_running=3, cache=False, threads=2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"port": "70000"}, ("--port", "0", "65535", "70000")),
        ({"kv_tokens": "0"}, ("--kv-tokens", "1", "'0'")),
        ({"memory_share": "nan"}, ("--memory-share", "0", "1", "nan")),
        ({"max_wait_s": "inf"}, ("--max-wait-s", "0", "inf")),
        ({"device": "gpu"}, ("--device", "cpu or cuda[:N]", "gpu")),
        ({"dtype": "int8"}, ("--dtype", "bfloat16", "float32", "int8")),
        ({"host": ""}, ("--host", "''")),
        (
            {"environment": {"AGENTFLOW_SERVE_LOG_PROMPTS": "maybe"}},
            ("AGENTFLOW_SERVE_LOG_PROMPTS", "true", "false", "maybe"),
        ),
        (
            {"environment": {"AGENTFLOW_SERVE_PROT": "1"}},
            ("AGENTFLOW_SERVE_PROT ", "AGENTFLOW_SERVE_PORT?"),
        ),
        (
            {"environment": {"AGENTFLOW_SERVE_FOO": "1"}},  # the prefix alone is like every setting
            ("AGENTFLOW_SERVE_FOO is not a setting: `agentflow serve --help` lists",),
        ),
        ({"tls_cert": "c.pem"}, ("tls_key",)),
        ({"tls_key_password": "x"}, ("tls_key_password", "tls_key")),
        ({"keys_file": "/no/such"}, ("keys_file", "/no/such")),
        ({"keys_file": "/"}, ("keys_file", "/ is a folder")),
        ({"models": ("a", "a")}, ("--model", "'a'", "twice")),
        ({"models": ("=x",)}, ("--model", "'=x'")),
        ({"models": ("x=",)}, ("--model", "'x='")),
        ({"environment": {"AGENTFLOW_SERVE_MODEL": ","}}, ("AGENTFLOW_SERVE_MODEL",)),
    ],
)
def test_an_error_is_one_line_that_names_its_source(arguments, named):
    message = refusal(**arguments)
    assert all(part in message for part in named)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[network]\nport = true", "network.port must be an integer from 0 to 65535, not true"),
        ("[network]\nport = '1'", "network.port must be an integer from 0 to 65535, not '1'"),
        ("[network]\nprot = 1", "[network] has no key 'prot': did you mean 'port'?"),
        ("[network]\nmax_n = 1", "[network] has no key 'max_n': it belongs in [limits]"),
        ("port = 1", "it belongs in [network]"),
        ("[networks]", "there is no table [networks]: did you mean [network]?"),
        ("[models]\na = 1", "models.a must be a table"),
        ("[models.a]\nthreds = 1", "[models.a] has no key 'threds': did you mean 'threads'?"),
        ("[models.a]\nname = 'b'", "[models.a] has no key 'name'"),
        ("[network]\ncors_origins = 'x'", "cors_origins must be a list"),
        ("[network", "TOML"),
    ],
)
def test_an_invalid_value_in_the_file_is_reported_with_its_key(file, text, reported):
    path = file(text)
    message = refusal(file=path)
    assert message.startswith(str(path))
    assert reported in message


def test_a_missing_or_binary_file_is_reported(tmp_path):
    message = refusal(file=tmp_path / "no")
    assert str(tmp_path / "no") in message
    assert "No such file or directory" in message
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refusal(file=tmp_path / "binary")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.5.5.5", "::1", "0:0:0:0:0:0:0:1", "LOCALHOST", "localhost"]
)
def test_a_loopback_address_needs_no_keys(host):
    network = loaded(host=host).config.network
    assert network.host == host
    known = _known_names(network)
    assert known is not None
    knows_host = accept_hosts(known)
    assert all(map(knows_host, ("localhost", "127.0.0.1", "::1")))
    assert not knows_host("pages.example")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "server.example"])
def test_other_addresses_need_keys_or_explicit_open_access(host, tmp_path):
    assert "--allow-anonymous" in refusal(host=host)
    assert _known_names(loaded(host=host, allow_anonymous=True).config.network) is None
    loaded(host=host, api_keys=["k"])
    (tmp_path / "keys.toml").touch()
    loaded(host=host, keys_file=str(tmp_path / "keys.toml"))


def test_secrets_are_never_shown(tmp_path):
    pem = tmp_path / "key.pem"
    pem.touch()
    secret = "af-0123456789"
    found = loaded(api_keys=[secret], tls_key=str(pem), tls_cert=str(pem), tls_key_password=secret)
    text = config_text(found)
    assert secret not in text
    assert "api_keys" not in tomllib.loads(text)["access"]  # nor does a default key appear in the file
    assert secret not in refusal(environment={"AGENTFLOW_SERVE_TLS_KEY_PASSWORD": secret})


def test_a_secret_of_the_wrong_type_is_not_shown(file):
    message = refusal(file=file("[access]\napi_keys = 'af-0123456789'"))
    assert "access.api_keys must be a list" in message
    assert "af-0123456789" not in message


def _value_of(kind: inspect.Type) -> st.SearchStrategy:
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.IntType():
            return st.integers(kind.ge or 0, kind.le or 10**12)
        case inspect.FloatType():
            return st.floats(kind.ge or kind.gt or 0, kind.le or 1e12, exclude_min=kind.gt is not None)
        case inspect.VarTupleType():
            return st.lists(_TEXTS, max_size=3)
        case inspect.StrType(pattern=str() as pattern):
            return st.from_regex(pattern, fullmatch=True)
        case _:
            return _TEXTS


_TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
_SEPARATE = ("tls_cert", "tls_key", "tls_key_password", "keys_file", "host", "api_keys", "redis_url")
_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/=\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)


@st.composite
def _flags(draw) -> dict[str, object]:
    separate = (*_SEPARATE, "served_model_names")  # of a single model only
    chosen = draw(st.sets(st.sampled_from([name for name in all_settings() if name not in separate])))
    values: dict[str, object] = {}
    for name in sorted(chosen):
        value = draw(_value_of(all_settings()[name].kind))
        values[name] = value if isinstance(value, bool | list) else str(value)
    return values


@given(_flags(), st.lists(st.tuples(_NAMES, _TEXTS), max_size=3, unique_by=lambda model: model[0]))
def test_a_printed_configuration_can_be_loaded(tmp_path_factory, flags, models):
    found = load_config(Flags(flags, tuple(f"{name}={path}" for name, path in models)), {})
    path = tmp_path_factory.mktemp("config") / "server.toml"
    path.write_text(config_text(found), encoding="utf-8")
    again = load_config(Flags({}, (), str(path)), {})
    assert again.config == found.config
    assert config_text(again).count(f"# file {path}") >= len(flags)


def test_a_models_own_settings_are_printed_too(file, tmp_path):
    path = file("[models.a]\nthreads = 7\ncache = false\n[models.'b c']\npath = 'x'\n")
    found = loaded(file=path)
    again = tmp_path / "again.toml"
    again.write_text(config_text(found))
    assert loaded(file=again).config == found.config
    assert found.own["a"] == {"threads": 7, "cache": False}


@pytest.mark.parametrize("name", [name for name in all_settings() if name not in _SEPARATE])
def test_every_setting_has_a_flag_a_variable_and_a_key(name, file):
    setting = all_settings()[name]
    kind = setting.kind
    match kind:
        case inspect.BoolType():
            value: object = not setting.default
        case inspect.LiteralType(values=values):
            value = next(one for one in values if one != setting.default)
        case inspect.IntType() | inspect.FloatType():
            value = 1 if kind.le == 1 else 5000
        case inspect.VarTupleType():
            value = ["a", "b"]
        case inspect.StrType(pattern=str()):
            value = "cpu"  # of the device, the only one
        case _:
            value = "a"
    written = str(value).lower() if isinstance(value, bool | int | float) else repr(value)
    flag = value if isinstance(value, list | bool) else str(value)
    variable = ",".join(value) if isinstance(value, list) else str(value).lower()
    by_flag = loaded(**{name: flag}).config
    assert by_flag != loaded().config
    assert loaded(environment={setting.variable: variable}).config == by_flag
    assert loaded(file=file(f"[{setting.table}]\n{name} = {written}\n")).config == by_flag


def test_the_limits_are_the_servers_own():
    config = loaded().config
    assert config.server_limits == ServerLimits()
    assert config.http_limits == HttpLimits()
    assert config.compile_limits == CompileLimits()
    changed = loaded(max_sessions="3", compile_cpu_s="7", max_prompt_tokens="9").config
    assert changed.server_limits == ServerLimits(max_sessions=3)
    assert changed.http_limits == HttpLimits(max_prompt_tokens=9)
    assert changed.compile_limits == CompileLimits(cpu_s=7)


def test_the_schema_agrees_with_the_engine():
    assert tuple(POLICIES) == get_args(PolicyName)
    assert {*model_settings()} == {"path", "aliases", *API_SETTINGS, *shared_names()}
    sections = {field.name: field.default for field in structs.fields(ServeConfig) if field.name != "models"}
    assert {name: type(default) for name, default in sections.items()} == {
        name: section.struct for name, section in SECTIONS.items()
    }
