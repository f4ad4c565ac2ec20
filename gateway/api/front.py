"""Holds the parts that the gRPC and HTTP interfaces share."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.admission.admission import Admission
from gateway.api.chat_plan import ChatPlanner
from gateway.api.credentials import Authenticator
from gateway.fleet.adapters import Adapters
from gateway.intake.assets import ModelAssets
from gateway.intake.validate import Validator
from gateway.metrics import Metrics
from gateway.request.request_runner import RequestRunner


@dataclass(frozen=True, slots=True)
class Front:
    """The set of objects that handle the requests of all protocols."""

    assets: ModelAssets
    authenticator: Authenticator
    admission: Admission
    validator: Validator
    runner: RequestRunner
    metrics: Metrics
    planner: ChatPlanner
    adapters: Adapters
