"""Builds a gateway's objects and runs the gateway: `python -m gateway --model DIR --redis-url URL`."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from block_store.errors import BlockStoreError, RedisUnusable
from block_store.redis.adapter_registry import AdapterRegistry
from block_store.redis.password import with_password
from block_store.redis.redis_server import open_client
from common.api_keys import read_keys
from common.errors import StartupError
from common.guard import Check
from common.rpc import Protection, RpcServer, host_port, wait_for_signal, write_ready_file
from common.service_main import run_service
from common.telemetry import Fallbacks
from common.tracing import tracer_of
from common.trust import trust_of
from gateway.admission.admission import Admission
from gateway.admission.gate import Gate
from gateway.admission.tenants import Tenants
from gateway.api.chat_plan import ChatPlanner
from gateway.api.credentials import Authenticator
from gateway.api.exposure import front_certificates, warn_of_public_bind
from gateway.api.front import Front
from gateway.api.grpc_service import InferenceServicer, key_check
from gateway.api.http_app import HttpApi
from gateway.api.http_fleet import FleetView
from gateway.api.http_frame import read_origins
from gateway.api.http_options import HttpOptions
from gateway.api.key_ring import KeyRing
from gateway.api.server import (
    HttpServer,
    announce_shutdown,
    bind_grpc,
    bind_http,
    drain,
    grpc_bounds,
    http_bounds,
    raise_file_limit,
    watch_blocks,
    watch_readiness,
)
from gateway.api.wrong_keys import WrongKeys
from gateway.fleet.adapters import Adapters
from gateway.fleet.block_feed import BlockFeed, prefill_arenas
from gateway.fleet.block_maps import BlockMaps
from gateway.fleet.discoveries import Discoveries
from gateway.fleet.liveness import LivenessLimits
from gateway.fleet.sharing import Targets
from gateway.fleet.workers import Workers
from gateway.intake.assets import load_assets
from gateway.intake.grammar_trial import GrammarTrials
from gateway.intake.public_prefixes import load_public_prefixes
from gateway.intake.salts import Salts
from gateway.intake.tokenizing import TokenizerPool
from gateway.intake.validate import Validator
from gateway.metrics import Metrics
from gateway.request.explanations import Explanations
from gateway.request.request_runner import RequestRunner
from gateway.settings import GatewaySettings, split_urls
from protos.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from gateway.vllm_grpc.ports import VllmPorts

logger = logging.getLogger("gateway")


async def main(settings: GatewaySettings) -> None:
    max_files = raise_file_limit()
    trust, tracer = trust_of(settings), tracer_of("gateway")
    origins = read_origins(settings.allowed_origins)
    http_socket = bind_http(settings.host, settings.port, reuse_port=settings.reuse_port)
    keys = read_keys(settings.api_key, settings.api_key_file)
    authenticator = Authenticator(keys.tenants, WrongKeys(settings.wrong_keys_per_minute))
    limits = LivenessLimits(settings.silence_s, settings.stall_s)
    workers = Workers(
        limits, trust, settings.restarts_file, await_workers=settings.await_workers,
        early_tokens=settings.early_pull_tokens,
    )  # fmt: skip
    workers.set_policy(
        Targets(settings.slo_ttft or math.inf, settings.slo_itl or math.inf),
        disaggregates=settings.disaggregation == "auto",
    )
    tenants, gate = Tenants(keys.limits, time.monotonic()), Gate(workers.gate_capacity)
    admission = Admission(
        settings.max_queue, settings.max_queue_wait, gate, tenants, lambda reason: metrics.refused(reason)
    )
    certificates = front_certificates(settings)
    warn_of_public_bind(settings, has_keys=bool(keys.tenants))

    def check_of(callers: Authenticator) -> Check:
        return key_check(callers, admission, lambda code: metrics.failed(code))

    protection = Protection(
        credentials=None if certificates is None else certificates.server_credentials(),
        reflection=settings.reflection,
        bounds=grpc_bounds(settings, max_files),
    )
    grpc_server = RpcServer(
        settings.host,
        settings.grpc_port,
        reuse_port=settings.reuse_port,
        check=check_of(authenticator),
        protection=protection,
    )
    bind_grpc(grpc_server, settings.grpc_port)
    vllm_ports = open_vllm_ports(settings, authenticator, check_of, protection)
    assets = await asyncio.to_thread(load_assets, settings.model, settings.served_model_name)
    pool = TokenizerPool(assets, settings.num_tokenizer_threads)
    try:
        urls = [with_password(url, settings.redis_password_file) for url in split_urls(settings.redis_url)]
        discovery = Discoveries(urls, settings.poll_s, workers.on_records, workers.stores.on_stores)
        await discovery.check()
    except RedisUnusable as error:
        raise StartupError(f"--redis-url: {error}") from None
    except BlockStoreError as error:
        raise StartupError(f"--redis-url: Redis cannot be reached: {error}") from None
    workers.use_ledgers(discovery.cached_tokens, discovery.end_ticket)

    def max_model_len() -> int:
        found = workers.max_model_len or assets.max_position
        return min(found, settings.max_model_len or found)

    salts = Salts((settings.salt_secret or secrets.token_hex(32)).encode())
    validator = Validator(
        assets,
        pool,
        salts,
        timeout_s=settings.request_timeout_s,
        max_model_len=max_model_len,
        group_rooms=lambda: workers.group_rooms,
        pooling=settings.pooling,
    )
    public = await load_public_prefixes(
        settings.public_prefix_file, lambda prompt, name: validator.tokenize(prompt, name, add_special_tokens=None)
    )
    validator.use_public(public.common_tokens)
    validator.use_quotas(tenants.cache_percent)
    trials = GrammarTrials(settings.model, assets.vocab_size)
    validator.use_grammars(trials.check)
    metrics = Metrics(assets.name)
    metrics.watch_queues(
        lambda: gate.num_running,
        lambda: admission.num_requests - gate.num_running,
        lambda: admission.wait_s() or 0.0,
    )
    adapters = adapters_of(settings, workers, assets.name)
    validator.use_adapters(adapters.find)
    feed = BlockFeed(
        lambda: prefill_arenas((state.record for state in workers.states.values()), discovery.ledgers),
        lambda tenant: salts.derive(tenant, None),
    )
    runner = RequestRunner(
        workers,
        gate,
        assets.tokenizer,
        metrics,
        max_attempts=settings.max_attempts,
        recover_s=settings.recover_s,
        used=admission.used,
        computed=feed.computed,
        using=adapters.using,
        explanations=Explanations(settings.explain_requests),
        tracer=tracer,
    )
    planner = ChatPlanner(assets, settings.tool_call_parser, settings.reasoning_parser)
    front = Front(assets, authenticator, admission, validator, runner, metrics, planner, adapters)
    grpc_server.add(
        inference_pb2_grpc.add_InferenceServiceServicer_to_server,
        InferenceServicer(front),
        "looseleaf.v1.InferenceService",
    )
    if vllm_ports is not None:
        vllm_ports.add_services(front, workers, settings.model, feed)
    grpc_servers = [grpc_server, *(vllm_ports.servers if vllm_ports else ())]
    is_leaving = asyncio.Event()
    has_begun = asyncio.Event()
    joined = asyncio.create_task(workers.joined(settings.expect_workers))

    def ready() -> bool:
        return workers.ready and joined.done() and has_begun.is_set()

    is_operator = tenants.is_operator if settings.allow_runtime_lora_updating and adapters.is_enabled else None
    maps = BlockMaps(workers.stores, settings.block_store, trust)
    fleet = FleetView(workers, maps, tenants.is_operator, is_leaving.is_set)
    app = HttpApi(front, fleet).app(
        lambda: ready() and not is_leaving.is_set(),
        is_operator=is_operator,
        show_metrics=settings.metrics,
        timeout_s=settings.request_timeout_s,
        body_budget_bytes=settings.body_budget_bytes,
        options=HttpOptions(settings.strict_fields, origins, describe=settings.reflection, page=settings.ui),
    )
    http_server = HttpServer(app, http_socket, http_bounds(settings, max_files), certificates)
    addresses = [host_port(settings.host, port) for port in (http_socket.getsockname()[1], grpc_server.port)]
    for server in grpc_servers:
        await server.start()
    await http_server.start()
    logger.info("http on %s, grpc on %s", *addresses)
    if vllm_ports is not None:
        addresses += vllm_ports.addresses
        logger.info("vLLM's protocol on %s, prefill on %s, decode on %s", *vllm_ports.addresses)
    tasks = [
        joined,
        asyncio.create_task(discovery.run()),
        asyncio.create_task(adapters.run()),
        asyncio.create_task(trials.warm()),
        asyncio.create_task(http_server.watch_certificates()),
        asyncio.create_task(watch_blocks(settings.block_store, workers, metrics, trust)),
        asyncio.create_task(
            watch_readiness(
                ready, grpc_servers, gate.wake, lambda: write_ready_file(settings.ready_file, addresses), is_leaving
            )
        ),
    ]
    await adapters.begin(settings.lora_modules)
    has_begun.set()
    key_ring = KeyRing(settings.api_key, settings.api_key_file, authenticator, tenants)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, key_ring.reload)
    await wait_for_signal(asyncio.Event())
    is_leaving.set()
    logger.info("shutting down: health checks fail; the ports close in %.1f s", settings.drain_delay)
    await announce_shutdown(grpc_servers, settings.drain_delay)
    logger.info("draining: at most %.0f s", settings.drain_s)
    admission.draining = True
    feed.close()
    await drain(admission.answers, [*grpc_servers, http_server], settings.drain_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await maps.close()
    await workers.close()
    await trials.close()
    discovery.close()
    pool.close()
    tracer.close()


def open_vllm_ports(
    settings: GatewaySettings,
    authenticator: Authenticator,
    check_of: Callable[[Authenticator], Check],
    protection: Protection,
) -> VllmPorts | None:
    """Binds and returns the ports of vLLM's protocol, or returns None if `vllm_grpc` is off.

    Raises StartupError if a port cannot be bound or a package is missing.
    """
    if not settings.vllm_grpc:
        return None
    try:
        from gateway.vllm_grpc.ports import VllmPorts  # needs an optional package
    except ImportError as error:
        raise StartupError(f"--vllm-grpc: {error}; pip install 'looseleaf[smg]'") from None
    return VllmPorts(settings, authenticator, check_of, protection)


def adapters_of(settings: GatewaySettings, workers: Workers, base_name: str) -> Adapters:
    """Returns the gateway's set of adapters, which is disabled if `enable_lora` is False.

    Raises StartupError if `lora_modules` or `allow_runtime_lora_updating` is set without `enable_lora`, or if
    `enable_lora` is set and `redis_url` names several servers.
    """
    if not settings.enable_lora:
        if settings.lora_modules or settings.allow_runtime_lora_updating:
            raise StartupError("--lora-modules and --allow-runtime-lora-updating need --enable-lora")
        return Adapters(workers, None, base_name)
    if len(split_urls(settings.redis_url)) > 1:  # workers look for adapters in the Redis server of their arena
        raise StartupError("--enable-lora needs a single Redis server, but --redis-url names several")
    client = open_client(with_password(settings.redis_url, settings.redis_password_file))
    return Adapters(workers, AdapterRegistry(client, Fallbacks(logger)), base_name)


if __name__ == "__main__":
    run_service("gateway", GatewaySettings, main)
