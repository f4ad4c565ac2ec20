"""Settings of a prefill worker."""

from __future__ import annotations

from common.settings import WorkerSettings, settings_config


class PrefillSettings(WorkerSettings):
    """Flags of `python -m prefill_svc`. The environment variables are LOOSELEAF_PREFILL_*."""

    model_config = settings_config("LOOSELEAF_PREFILL_", "prefill_svc")
