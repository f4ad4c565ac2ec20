"""A decode worker with the faults of `faulty.VARIABLE`. The program takes the flags of `python -m decode_svc`."""

from common.service_main import run_service
from decode_svc.__main__ import main
from decode_svc.settings import DecodeSettings
from testing.chaos.faulty import install

if __name__ == "__main__":
    install()
    run_service("decode_svc", DecodeSettings, main)
