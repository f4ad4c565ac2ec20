"""One line of generated text, which a launch prints when it is ready."""

from __future__ import annotations

_PROMPT = "Once upon a time"
_TOKENS = 24


def sample(address: str, api_key: str | None, tls_ca: str | None, *, is_tls: bool) -> str:
    """Returns a line of generated text without characters that a terminal would interpret. `address` is that of the
    gateway's gRPC.
    """
    if is_tls and tls_ca is None:
        return "  says  nothing yet: verifying the gateway's certificate needs --tls-ca"
    from looseleaf.client import Client  # imported here, so that services are started before gRPC is loaded

    with Client(address, api_key=api_key, timeout=60.0, tls_ca=tls_ca if is_tls else None) as client:
        completion = client.generate(_PROMPT, max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    return f"  says  {one_line(_PROMPT + completion.text)}"


def one_line(text: str) -> str:
    """Returns the text with each run of white space as one space, and unprintable characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
