"""Defines the class `LLM`, a model that is served on this machine until the object is closed.

with LLM("path/to/model") as llm:
    for completion in llm.generate(["Once upon a time", "The wolf"], max_tokens=32):
        print(completion.text)
"""

from __future__ import annotations

import atexit
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, Unpack, cast

from pydantic import ValidationError

from common.api_keys import read_keys
from common.errors import ResourceExhausted, StartupError
from looseleaf import metrics_page
from looseleaf.client import Client
from looseleaf.options import GenerateOptions, Message, Prompt, given
from looseleaf.results import Completion
from looseleaf.serve.launcher import Launcher
from looseleaf.serve.settings import ServeSettings
from looseleaf.serve.supervisor import Supervisor

_MAX_IN_FLIGHT = 64
"""Maximum number of sequences that `generate` requests at once, unless a single prompt has more."""
_PATIENCE_S = 600.0
_PORTS = ("port", "grpc_port", "vllm_grpc_port", "vllm_grpc_prefill_port", "vllm_grpc_decode_port")


class LLM:
    """A served model. The constructor starts its services. They end when `close` is called, or when the `with` block or
    the Python process ends.
    """

    def __init__(self, model: str | None = None, *, verbose: bool = False, **settings: Any) -> None:
        """Serves `model`: a Hugging Face directory, a GGUF file or a name on the Hugging Face Hub. Without a model,
        serves the default model of `looseleaf serve`.

        `settings` are the flags of `looseleaf serve` with underscores. By default, free ports are used, and `spare` is
        0. `verbose` forwards the services' logs to stderr. Raises TypeError for an unknown setting, and StartupError
        for a bad value or if the services cannot be started.
        """
        complete = serve_settings(model, settings)
        self._launcher = Launcher(complete, *([] if verbose else [_drop]))
        self.addresses = self._launcher.start()
        self._supervisor = Supervisor(self._launcher)
        self._supervisor.start()
        atexit.register(self.close)
        keys = read_keys(complete.api_key, complete.api_key_file)
        self._tls_ca = complete.tls_ca if self.addresses.is_tls else None
        self._api_key = next(iter(keys.tenants), None)
        self.client = self._connect()

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Returns one completion per prompt, in the same order. With `n` or `beam_width`, each completion has several
        `samples`.

        A single text, list of token ids or chat counts as one prompt. If a prompt fails, or the call is interrupted,
        the other prompts are cancelled.
        """
        all_prompts = [cast(Prompt, prompts)] if is_prompt(prompts) else cast(Sequence[Prompt], prompts)
        return self._all(all_prompts, given(options))

    def chat(self, messages: str | Sequence[Message], **options: Unpack[GenerateOptions]) -> Completion:
        """Returns the assistant's next turn after `messages`. A string counts as one user turn."""
        return self.client.chat(messages, **options)

    def _all(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[Completion]:
        if not prompts:
            return []
        if self._supervisor.failure is not None:
            raise self._supervisor.failure
        width = max(1, options.get("n", 1), options.get("beam_width", 1))
        ended = threading.Event()
        num_threads = min(len(prompts), max(1, _MAX_IN_FLIGHT // width))
        with self._connect() as client, ThreadPoolExecutor(num_threads) as pool:
            try:
                return list(pool.map(lambda prompt: _patiently(client, prompt, options, ended), prompts))
            except BaseException:  # KeyboardInterrupt included
                ended.set()
                client.close()  # cancels the running calls
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _connect(self) -> Client:
        return Client(self.addresses.grpc, api_key=self._api_key, tls_ca=self._tls_ca)

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each service, by name."""
        return self._launcher.pids

    def requests_by_worker(self) -> dict[str, int]:
        """Returns the number of requests that the gateway has sent to each worker, by the worker's name ("prefill",
        "decode-1", ...).
        """
        tls = ssl.create_default_context(cafile=self._tls_ca) if self.addresses.is_tls else None
        samples = metrics_page.read(self.addresses.http, tls)
        return {s.labels["worker"]: int(s.value) for s in samples if s.name == "looseleaf_worker_requests_total"}

    def close(self) -> None:
        """Ends the services. A second call does nothing."""
        atexit.unregister(self.close)
        self.client.close()
        self._supervisor.end()
        self._launcher.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _patiently(client: Client, prompt: Prompt, options: GenerateOptions, ended: threading.Event) -> Completion:
    """Runs one prompt of a batch. If the gateway refuses the prompt with a retry time, waits and tries again until the
    timeout, or until the batch has ended.
    """
    until = time.monotonic() + options.get("timeout", _PATIENCE_S)
    while True:
        try:
            return client.generate(prompt, **options)
        except ResourceExhausted as refusal:
            if refusal.retry_after_s is None or time.monotonic() + refusal.retry_after_s > until:
                raise
            if ended.wait(refusal.retry_after_s):
                raise


def serve_settings(model: str | None, given: dict[str, Any]) -> ServeSettings:
    """Returns the settings of a launch, by default on free ports. Raises TypeError for an unknown name and StartupError
    for a bad value.
    """
    unknown = sorted(set(given) - set(ServeSettings.model_fields))
    if unknown:
        known = ", ".join(sorted(ServeSettings.model_fields))
        raise TypeError(f"unknown setting {unknown[0]!r}; the settings are {known}")
    try:
        return ServeSettings(**{**dict.fromkeys(_PORTS, 0), "spare": 0, "model": model, **given})
    except ValidationError as error:
        first = error.errors()[0]
        raise StartupError(f"setting {first['loc'][0]!r}: {first['msg']} (got {first.get('input')!r})") from None


def is_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Returns whether `prompts` is one prompt rather than several."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, Mapping)))


def _drop(line: str) -> None:
    """Discards a log line. `Child` keeps a service's last lines for `ChildDied`."""
