"""The services of a deployment on Ray's head node: the gateway and Redis, as child processes of this process."""

from __future__ import annotations

from common.errors import StartupError
from common.rpc import host_port
from common.secret_files import write_secret
from looseleaf.cluster.shared import Shared
from looseleaf.serve.addresses import check_port_free, check_ports_free
from looseleaf.serve.children import Echo, wait_ready
from looseleaf.serve.model_source import resolve
from looseleaf.serve.service_flags import flags_of, gateway_flags, gateway_secrets, vllm_grpc_ports
from looseleaf.serve.service_group import ServiceGroup
from looseleaf.serve.service_variables import check_variables

_EVERY = ("0.0.0.0", "::", "[::]", "")


class FrontGroup(ServiceGroup):
    """The owner of the gateway's process and of Redis. The gateway's ports stay the same when it is restarted."""

    def __init__(self, shared: Shared, address: str, echo: Echo) -> None:
        """`address` is the node's address, on which Redis listens."""
        super().__init__(shared.settings(), echo)
        self._deployment = shared
        self._address = address
        self.addresses: tuple[str, str] | None = None
        """The addresses of HTTP and gRPC, once the gateway is ready."""

    def start(self) -> None:
        """Starts Redis and the gateway. Returns when the gateway serves requests, which needs workers. Raises
        StartupError if a service does not start; call `stop` in this case too.
        """
        settings = self._settings
        check_variables(["gateway", "prefill_svc", "decode_svc", "block_store"])
        source = resolve(settings.model or settings.model_directory, dummy=settings.load_format == "dummy")
        check_ports_free(settings.host, settings.port, settings.grpc_port)
        check_ports_free(settings.vllm_grpc_host, *vllm_grpc_ports(settings))
        self._make_directories()
        write_secret(self._secret_file, self._deployment.secret)
        self._start_shared_redis()
        flags = [*gateway_flags(settings, source, None), *flags_of({"await_workers": True})]
        secrets = gateway_secrets(settings, self._deployment.redis_url, self._deployment.salt)
        gateway = self._spawn("gateway", "gateway", flags, secrets)
        [lines] = wait_ready([gateway], self._children, settings.startup_timeout_s)
        self._keep_ports({"gateway": lines})
        http, grpc_address = (self._reachable(line) for line in lines[:2])
        self.addresses = http, grpc_address

    def _start_shared_redis(self) -> None:
        """Starts the deployment's Redis server, unless the settings name another one. Its password is that of the
        deployment, so that the hosts find it again after this process has been restarted.
        """
        if self._settings.redis_url is not None:
            return
        port = self._deployment.settings().redis_port
        try:
            check_port_free(self._address, port)
        except StartupError as error:
            raise StartupError(f"redis_port: {error}") from None
        write_secret(self._directory / "redis.password", self._deployment.redis_password)
        self._start_redis((self._address, port))

    def _reachable(self, line: str) -> str:
        host, _, port = line.rpartition(":")
        return host_port(self._address, int(port)) if host in _EVERY else line
