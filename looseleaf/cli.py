"""The command `looseleaf`. A command's module is imported only when the command runs.

    looseleaf serve [MODEL]             start everything on this machine
    looseleaf up FILE                   start a deployment on the nodes of a Ray cluster
    looseleaf status                    show the nodes, hosts and workers of that deployment, or their logs
    looseleaf scale decode=3            change its numbers of workers
    looseleaf down                      drain and end it
    looseleaf complete "Once upon"      stream a continuation
    looseleaf chat ["message"]          answer a message, or hold a conversation turn by turn
    looseleaf health [ADDRESS]          exit status 0 if the service there is ready
    looseleaf doctor [MODEL]            check this machine
    looseleaf plan MODEL                what a model and a context length need, with the arithmetic
    looseleaf simulate TRACE            predict latencies, or the workers that a load needs, from measured times
    looseleaf explain [ID]              where the time of a request went, and which workers served it
    looseleaf top [ADDRESS]             requests, workers and blocks, refreshed in the terminal
    looseleaf blocks [ADDRESS]          who holds which KV block
    looseleaf fsck DIRECTORY            compare ledger, arena and workers
    looseleaf secrets DIRECTORY         create secrets for services that run without a launcher
    looseleaf certs DIRECTORY           create a CA and certificates for trying TLS

Exit status: 0 success, 1 refusal, failure or a negative answer, 2 a mistake in flags or variables, 130 an interrupt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

_COMMANDS = {
    "serve": "looseleaf.commands.serve",
    "up": "looseleaf.commands.up",
    "status": "looseleaf.commands.cluster:status",
    "scale": "looseleaf.commands.cluster:scale",
    "down": "looseleaf.commands.cluster:down",
    "complete": "looseleaf.commands.complete",
    "chat": "looseleaf.commands.chat",
    "health": "looseleaf.commands.health",
    "doctor": "looseleaf.commands.doctor",
    "plan": "looseleaf.commands.plan",
    "simulate": "looseleaf.commands.simulate",
    "explain": "looseleaf.commands.explain",
    "top": "looseleaf.commands.top",
    "blocks": "looseleaf.commands.blocks",
    "fsck": "looseleaf.commands.fsck",
    "secrets": "looseleaf.commands.secrets",
    "certs": "looseleaf.commands.certs",
}
"""The module of each command, and the name of its function if it is not `run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(f"{__doc__}\n`looseleaf COMMAND --help` shows the flags of a command.")
        return 0 if words else 2
    if name == "--version":
        from looseleaf import __version__

        print(f"looseleaf {__version__}")
        return 0
    if name not in _COMMANDS:
        print(f"looseleaf: unknown command {name!r}; the commands are {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    return _guarded(_COMMANDS[name], words[1:])


def _guarded(command: str, argv: Sequence[str]) -> int:
    """Runs a command and returns the exit status. Prints the message of an expected failure to stderr."""
    from common.errors import LooseleafError, StartupError

    try:
        module, _, function = command.partition(":")
        run: Callable[[Sequence[str]], int] = getattr(import_module(module), function or "run")
        return run(argv)
    except (LooseleafError, StartupError) as error:
        print(f"looseleaf: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has ended; prevents an error of the interpreter at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
