"""Where the settings of a launch's services come from: flags, then variables, then defaults."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from block_store.settings import BlockStoreSettings
from common.errors import StartupError
from common.settings import Settings
from decode_svc.settings import DecodeSettings
from gateway.settings import GatewaySettings
from looseleaf.both_roles.settings import BothSettings
from looseleaf.serve.model_source import ModelSource
from looseleaf.serve.placement import settled, worker_processes
from looseleaf.serve.service_flags import (
    gateway_flags,
    gateway_secrets,
    inside_flags,
    store_flags,
    store_secrets,
    worker_flags,
)
from looseleaf.serve.service_variables import DECIDED, check_variables, variable
from looseleaf.serve.settings import ServeSettings
from prefill_svc.settings import PrefillSettings

SERVICES: dict[str, type[Settings]] = {
    "block_store": BlockStoreSettings,
    "gateway": GatewaySettings,
    "prefill_svc": PrefillSettings,
    "decode_svc": DecodeSettings,
    "looseleaf.both_roles": BothSettings,
}
SAMPLES: dict[str, tuple[str, str]] = {
    "vllm_grpc": ("true", "true"),  # `serve` passes on the other settings of vLLM's protocol only with it
    "advertise": ("a:1", "b:2"),
    "lora_modules": ('["a=b"]', '["c=d"]'),
    "speculative_config": (
        '{"method": "ngram", "num_speculative_tokens": 2}',
        '{"method": "ngram", "num_speculative_tokens": 3}',
    ),
}
NAMES_IN_SERVE = {("gateway", "drain_s"): "grace_s"}
NOT_PASSED_ON = {(package, "max_queue") for package in ("prefill_svc", "decode_svc", "looseleaf.both_roles")}
"""Settings that mean something else in `serve`: its `max_queue` is the gateway's."""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("LOOSELEAF_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LOOSELEAF_SERVE_DEVICE", "cpu")


def samples(name: str, field: FieldInfo) -> tuple[str, str]:
    """Returns two values of a setting, in a variable's form. The first one is not the default."""
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind is not type(None)]
    if name in SAMPLES:
        return SAMPLES[name]
    for kind in kinds:
        if get_origin(kind) is Literal:
            first, *others = [choice for choice in get_args(kind) if choice != field.default]
            return first, others[0] if others else str(field.default)
    if bool in kinds:
        return str(not field.default).lower(), str(field.default).lower()
    if 1 in [rule.le for rule in field.metadata if isinstance(rule, Le)]:
        return "0.25", "0.75"
    if {int, float} & set(kinds) or "ByteSize" in str(field.annotation):
        least = max([int(str(rule.ge)) for rule in field.metadata if isinstance(rule, Ge)], default=1)
        return str(least + 5), str(least + 6)
    return "/sample/one", "/sample/two"


def sampled(package: str, which: int) -> dict[str, str]:
    """Returns a value of each setting of a service that the launch does not decide."""
    fields = SERVICES[package].model_fields
    return {name: samples(name, field)[which] for name, field in fields.items() if name not in DECIDED[package]}


def in_serve(package: str, values: dict[str, str]) -> dict[str, str]:
    """Returns those of the values that `serve` has a setting for, by its name in `serve`."""
    named = {NAMES_IN_SERVE.get((package, name), name): value for name, value in values.items()}
    known = ServeSettings.model_fields
    return {name: value for name, value in named.items() if name in known and (package, name) not in NOT_PASSED_ON}


def flag(name: str, value: str) -> list[str]:
    dashed = name.replace("_", "-")
    if value in ("true", "false"):
        return [f"--{dashed}" if value == "true" else f"--no-{dashed}"]
    return [f"--{dashed}", json.loads(value)[0] if value.startswith("[") else value]


def loaded(package: str, *given: str) -> Settings:
    """Returns the settings that a service has in a launch with these flags."""
    roles = "both" if package == "looseleaf.both_roles" else "split"
    settings = settled(ServeSettings.load(["--roles", roles, *given]))
    check_variables(["block_store", "gateway", *{name for _, name in worker_processes(settings)}])
    source, url = ModelSource(Path("/m")), "redis://localhost"
    flags, secrets = {
        "block_store": lambda: (store_flags(settings, Path("/shm"), source), store_secrets(url)),
        "gateway": lambda: (gateway_flags(settings, source, "a:1"), gateway_secrets(settings, url, "the salt secret")),
    }.get(package, lambda: (worker_flags(settings, source, "a:1", package), {}))()
    with pytest.MonkeyPatch.context() as inside:
        for name, value in secrets.items():
            inside.setenv(name, value)
        return SERVICES[package].load([*flags, *inside_flags(settings, Path("/secret"))])


def differences(package: str, settings: Settings, expected: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    """Returns the settings whose values are not the expected ones, each with its value and the expected one."""
    service = SERVICES[package]
    found = {}
    for name, text in expected.items():
        given = json.loads(text) if text.startswith("[") else text
        blank = service.model_construct()
        want = getattr(service.__pydantic_validator__.validate_assignment(blank, name, given), name)
        if (got := getattr(settings, name)) != want:
            found[name] = got, want
    return found


@pytest.mark.parametrize("package", SERVICES)
def test_every_variable_of_a_service_takes_effect(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    given = sampled(package, 0)
    for name, value in given.items():
        monkeypatch.setenv(variable(package, name), value)
    assert not differences(package, loaded(package), given)


@pytest.mark.parametrize("package", SERVICES)
def test_flags_and_variables_of_serve_override_those_of_services(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name, value in sampled(package, 0).items():
        monkeypatch.setenv(variable(package, name), value)
    others = in_serve(package, sampled(package, 1))
    expected = {name: value for name, value in sampled(package, 1).items() if in_serve(package, {name: value})}
    flags = [part for name, value in others.items() for part in flag(name, value)]
    assert len(expected) > 5 and not differences(package, loaded(package, *flags), expected)
    for name, value in others.items():
        monkeypatch.setenv(f"LOOSELEAF_SERVE_{name.upper()}", value)
    assert not differences(package, loaded(package), expected)


def test_vllms_protocol_can_be_turned_off_by_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOSELEAF_GATEWAY_VLLM_GRPC", "true")
    assert not differences("gateway", loaded("gateway"), {"vllm_grpc": "true"})
    assert not differences("gateway", loaded("gateway", "--no-vllm-grpc"), {"vllm_grpc": "false"})


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in DECIDED for name in DECIDED[package]])
def test_a_variable_that_the_launch_decides_is_refused(
    monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    assert name in SERVICES[package].model_fields
    monkeypatch.setenv(variable(package, name).lower(), "1")
    with pytest.raises(StartupError, match=f"^{variable(package, name)} is set, but `looseleaf serve` decides"):
        check_variables([package])


def test_a_variable_of_a_worker_that_is_not_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOSELEAF_DECODE_MAX_NUM_SEQS", "32")
    with pytest.raises(StartupError, match="one process hosts both roles; set LOOSELEAF_WORKER_MAX_NUM_SEQS, or use"):
        loaded("looseleaf.both_roles")
    monkeypatch.setenv("LOOSELEAF_WORKER_MAX_NUM_SEQS", "33")
    assert not differences("looseleaf.both_roles", loaded("looseleaf.both_roles"), {"max_num_seqs": "33"})
    monkeypatch.delenv("LOOSELEAF_DECODE_MAX_NUM_SEQS")
    with pytest.raises(StartupError, match="in separate processes; set LOOSELEAF_PREFILL_MAX_NUM_SEQS or LOOSELEAF_DE"):
        loaded("decode_svc")


def test_switches_have_the_same_default_in_serve_and_in_services() -> None:
    for package, service in SERVICES.items():
        for name, field in service.model_fields.items():
            if isinstance(field.default, bool) and name in ServeSettings.model_fields:
                assert ServeSettings.model_fields[name].default is field.default, (package, name)
