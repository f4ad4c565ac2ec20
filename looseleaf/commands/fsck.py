"""`looseleaf fsck DIRECTORY [REDIS_URL]`: compares the ledger in Redis, the arena's header and the workers' blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from block_store import operator_file
from block_store.errors import BlockStoreError
from block_store.server.fsck import check
from common.errors import StartupError
from common.settings import Settings, settings_config


class FsckSettings(Settings):
    """Flags of `looseleaf fsck`, which prints the differences that persist. Its exit status is 0 if all workers
    reported and there are no differences, or if the ledger was rebuilt.
    """

    model_config = settings_config("LOOSELEAF_FSCK_", "looseleaf fsck")

    directory: CliPositionalArg[str] = Field(description="the block store's directory on shared memory")
    redis_url: CliPositionalArg[str | None] = Field(
        None, description="Redis server of the ledger; default: the one that the running block store uses"
    )
    digests: bool = Field(False, description="also compare the bytes of sealed blocks with their digests")
    repair: bool = Field(False, description="rebuild the ledger if there are differences; requests continue")


def run(argv: Sequence[str]) -> int:
    settings = FsckSettings.load(argv)
    directory = Path(settings.directory)
    if (redis_url := settings.redis_url) is None:
        if (found := operator_file.read(directory)) is None:
            raise StartupError(f"no block store of this user runs in {directory}; give the URL of its Redis server")
        redis_url = found.redis_url
    try:
        return check(directory, redis_url, digests=settings.digests, and_repair=settings.repair)
    except BlockStoreError as error:
        raise StartupError(str(error)) from error
