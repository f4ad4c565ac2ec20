"""Settings of a prefill worker."""

from __future__ import annotations

from common.settings import WorkerSettings, settings_config


class PrefillSettings(WorkerSettings):
    """The settings of a prefill worker. Each can be given as a flag of `python -m prefill_svc`, or as an environment
    variable whose name begins with LOOSELEAF_PREFILL_.
    """

    model_config = settings_config("LOOSELEAF_PREFILL_", "prefill_svc")
