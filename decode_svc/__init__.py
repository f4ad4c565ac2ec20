"""The decode service, which takes over block tables from prefill and generates tokens."""
