"""Builds the answers that describe an endpoint: its model, its server, its load, and the tokenizer's files."""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import time
import zipfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from common.errors import NotFound
from common.version import VERSION
from gateway.fleet.worker_state import WorkerState
from gateway.fleet.workers import Workers
from gateway.intake.assets import ModelAssets, read_json

Role = Literal["regular", "prefill", "decode"]
CONNECTOR = "LooseleafConnector"
KV_ROLES = {"regular": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}
_CHUNK_BYTES = 64 << 10
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip


class About:
    """The source of the answers that describe one gateway, for the endpoints of all roles."""

    def __init__(self, assets: ModelAssets, directory: str, workers: Workers) -> None:
        self._assets = assets
        self._directory = Path(directory).resolve()
        self._config = read_json(self._directory / "config.json")
        self._workers = workers
        self._started = time.monotonic()
        self._engine_id = secrets.token_hex(8)
        """The id by which routers pair endpoints: a prefill can be continued only at the gateway that made it."""

    def model(self, max_model_len: int) -> pb.GetModelInfoResponse:
        assets, config = self._assets, self._config
        return pb.GetModelInfoResponse(
            model_path=str(self._directory),
            tokenizer_path=str(self._directory),
            served_model_name=assets.name,
            is_generation=True,
            max_context_length=max_model_len,
            max_req_input_len=max_model_len,
            vocab_size=assets.vocab_size,
            model_type=str(config.get("model_type") or ""),
            architectures=config.get("architectures") or [],
            eos_token_ids=assets.eos_token_ids,
            bos_token_id=_id(config.get("bos_token_id")),
            pad_token_id=_id(config.get("pad_token_id")),
            default_sampling_params_json=json.dumps(asdict(assets.defaults)),
        )

    def server(self, role: Role, active_requests: int) -> pb.GetServerInfoResponse:
        states = self._of_role("prefill" if role == "prefill" else "decode")
        return pb.GetServerInfoResponse(
            active_requests=active_requests,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",
            kv_connector=CONNECTOR,
            kv_role=KV_ROLES[role],
            kv_engine_id=self._engine_id,
            pairing_protocol=self._engine_id,
            data_parallel_size=1,
            block_size=min((state.record.block_size for state in states), default=0),
            max_num_seqs=sum(state.record.max_num_seqs for state in states),
            constrained_decoding_start="first_token",
        )

    def loads(self, role: Role) -> pb.GetLoadsResponse:
        """Returns the load of the role's workers as the load of one engine. A `regular` endpoint reports the sequences
        of the decode workers and the waiting tokens of the prefill workers.
        """
        prefills, decodes = self._of_role("prefill"), self._of_role("decode")
        states = prefills if role == "prefill" else decodes
        running = sum(state.load.num_running for state in states)
        waiting = sum(state.load.num_waiting + state.load.num_preempted for state in states)
        total, used = _tokens(states)
        load = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used,
            max_total_num_tokens=total,
            token_usage=used / total if total else 0.0,
            max_running_requests=sum(state.record.max_num_seqs for state in states),
            num_waiting_uncached_tokens=0 if role == "decode" else sum(s.load.waiting_tokens for s in prefills),
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=VERSION, dp_rank_count=1, loads=[load]
        )

    def tokenizer(self) -> list[common_pb2.GetTokenizerChunk]:
        """Returns a ZIP archive of the tokenizer's files in chunks. The last chunk has the SHA-256 of the archive.
        Raises NotFound if there are no files.
        """
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in (self._directory / name for name in _TOKENIZER_FILES):
                if path.is_file():
                    archive.write(path, path.name)
        data = buffer.getvalue()
        if not archive.namelist():
            raise NotFound("the model's directory has no tokenizer files")
        starts = range(0, len(data), _CHUNK_BYTES)
        chunks = [common_pb2.GetTokenizerChunk(data=data[start : start + _CHUNK_BYTES]) for start in starts]
        chunks[-1].sha256 = hashlib.sha256(data).hexdigest()
        return chunks

    def _of_role(self, role: Literal["prefill", "decode"]) -> list[WorkerState]:
        return [s for s in self._workers.states.values() if s.record.role == role and not s.record.draining]


def _tokens(states: list[WorkerState]) -> tuple[int, int]:
    """Returns the number of token positions in all arenas of the workers, and how many positions are in use. An arena
    that several workers share counts once.
    """
    arenas = {state.record.arena_id: state for state in states}.values()
    total = sum(state.load.total_blocks * state.record.block_size for state in arenas)
    return total, total - sum(state.load.free_blocks * state.record.block_size for state in arenas)


def _id(value: Any) -> int:
    """Returns a token id from a model's config, or 0 if it is missing or a list."""
    return value if isinstance(value, int) else 0
