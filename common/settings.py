"""The base of every service's settings: environment variables and flags from one definition, mistakes refused.

A field `max_num_seqs` of a service with prefix LOOSELEAF_DECODE_ is the flag `--max-num-seqs` and the variable
LOOSELEAF_DECODE_MAX_NUM_SEQS. Flags win over variables, variables over defaults. pydantic-settings ignores a mistyped
variable even with extra="forbid"; this base does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError


class Settings(BaseSettings):
    """Derive, give `model_config = settings_config("LOOSELEAF_X_", "x")`, declare fields, call `load(argv)`."""

    model_config = SettingsConfigDict(extra="forbid")

    @classmethod
    def load(cls, argv: Sequence[str]) -> Self:
        """Settings from flags and environment; prints what is wrong and exits with status 2 on any mistake."""
        try:
            cls.refuse_unknown_variables()
            return CliApp.run(cls, cli_args=list(argv))
        except ValidationError as error:
            prog = str(cls.model_config.get("cli_prog_name"))
            for item in error.errors():
                name = "--" + ".".join(str(part) for part in item["loc"]).replace("_", "-")
                print(f"{prog}: setting {name}: {item['msg']} (got {item.get('input')!r})", file=sys.stderr)
            sys.exit(2)
        except SettingsError as error:
            _refuse(str(cls.model_config.get("cli_prog_name")), str(error))

    @classmethod
    def refuse_unknown_variables(cls) -> None:
        """Exit with status 2 if a variable with our prefix matches no field."""
        prefix = str(cls.model_config.get("env_prefix", ""))
        known = {prefix + name.upper() for name in cls.model_fields}
        unknown = sorted(name for name in os.environ if name.upper().startswith(prefix) and name.upper() not in known)
        if unknown:
            prog = str(cls.model_config.get("cli_prog_name"))
            _refuse(prog, f"unknown environment variable {unknown[0]}; known are {', '.join(sorted(known))}")


def settings_config(env_prefix: str, prog: str) -> SettingsConfigDict:
    """The model_config of a service's settings."""
    return SettingsConfigDict(
        env_prefix=env_prefix,
        extra="forbid",
        cli_prog_name=prog,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )


def _refuse(prog: str, message: str) -> NoReturn:
    print(f"{prog}: {message}", file=sys.stderr)
    sys.exit(2)
