"""A prefill worker with the faults of `faulty.VARIABLE`. The program takes the flags of `python -m prefill_svc`."""

from common.service_main import run_service
from prefill_svc.__main__ import main
from prefill_svc.settings import PrefillSettings
from testing.chaos.faulty import install

if __name__ == "__main__":
    install()
    run_service("prefill_svc", PrefillSettings, main)
