"""Contains the code that several packages share, such as types, errors, RPC helpers, settings and telemetry. It imports
neither torch nor redis.
"""
