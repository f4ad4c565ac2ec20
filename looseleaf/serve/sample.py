"""One line of generated text, which a launch prints when it is ready."""

from __future__ import annotations

from common.api_keys import ApiKeys, TenantLimits

_PROMPT = "Once upon a time"
_TOKENS = 24


def sample(address: str, keys: ApiKeys, certificate: str | None) -> str:
    """Returns a line of generated text without characters that a terminal would interpret, or a line with the reason
    why there is none. `address` is that of the gateway's gRPC, and `certificate` the file of its certificate, or None
    if it does not use TLS.
    """
    try:
        text = _generate(address, keys, certificate)
    except Exception as error:  # services that are ready keep serving, whatever is wrong with this request
        return f"  says  nothing: {one_line(str(error) or type(error).__name__)}"
    return f"  says  {one_line(text)}"


def _generate(address: str, keys: ApiKeys, certificate: str | None) -> str:
    from looseleaf.client import Client  # imported here, so that services are started before gRPC is loaded

    key, priority = _key_and_priority(keys)
    with Client(address, api_key=key, timeout=60.0, tls_ca=certificate) as client:
        room = client.models()[0].max_model_len - len(client.tokenize(_PROMPT))
        most = max(1, min(_TOKENS, room))
        completion = client.generate(_PROMPT, max_tokens=most, temperature=0.0, ignore_eos=True, priority=priority)
    return _PROMPT + completion.text


def _key_and_priority(keys: ApiKeys) -> tuple[str | None, int]:
    """Returns the first key whose tenant has no quota, and the default priority or, if the tenant may not use it, the
    tenant's best. The key is None if clients need none.
    """
    if not keys.tenants:
        return None, 0
    for key, tenant in keys.tenants.items():
        limits = keys.limits.get(tenant, TenantLimits())
        if limits.requests_per_minute is None and limits.tokens_per_minute is None:
            return key, max(0, limits.best_priority or 0)
    raise LookupError("every tenant has a quota, which this line does not spend")


def one_line(text: str) -> str:
    """Returns the text with each run of white space as one space, and unprintable characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
