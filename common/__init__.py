"""What every service shares: types, errors, RPC helpers, settings base, telemetry. No torch, no redis."""
