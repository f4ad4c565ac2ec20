"""A decode worker that records its blocks after every step (`watching`). Takes the flags of `python -m decode_svc`."""

from bench.served.watching import install
from common.service_main import run_service
from decode_svc.__main__ import main
from decode_svc.settings import DecodeSettings

if __name__ == "__main__":
    install()
    run_service("decode_svc", DecodeSettings, main)
