"""Code that all services share: types, errors, RPC helpers, settings, telemetry. It imports neither torch nor redis."""
