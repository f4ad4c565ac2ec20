"""`looseleaf secrets DIRECTORY`: creates the secret that the services of a deployment share and the password of their
Redis, in separate files.

It is for compose and for services that are started by hand; `looseleaf serve` creates its own secrets. Existing files
are kept, so that services that are started later have the same secrets as those that are running.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic_settings import CliPositionalArg

from common.errors import StartupError
from common.secret_files import write_secret
from common.settings import Settings, settings_config

NAMES = ("secret", "redis-password")


class SecretsSettings(Settings):
    """Flags of `looseleaf secrets`, which creates the files `secret` and `redis-password` for the services' flags
    --secret-file and --redis-password-file.
    """

    model_config = settings_config("LOOSELEAF_SECRETS_", "looseleaf secrets")

    directory: CliPositionalArg[Path]


def run(argv: Sequence[str]) -> int:
    settings = SecretsSettings.load(argv)
    try:
        settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in NAMES:
            with suppress(FileExistsError):
                write_secret(settings.directory / name)
    except OSError as error:
        raise StartupError(f"{settings.directory}: {error.strerror}") from error
    print(" ".join(str(settings.directory / name) for name in NAMES))
    return 0
