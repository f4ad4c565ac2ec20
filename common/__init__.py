"""Code that all services share: types, errors, RPC helpers, base of the settings, telemetry. No torch, no redis."""
