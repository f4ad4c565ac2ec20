"""Settings of a prefill worker."""

from __future__ import annotations

from common.settings import WorkerSettings, settings_config


class PrefillSettings(WorkerSettings):
    """The settings of a prefill worker: flags of `python -m prefill_svc`, or LOOSELEAF_PREFILL_* in the environment."""

    model_config = settings_config("LOOSELEAF_PREFILL_", "prefill_svc")
