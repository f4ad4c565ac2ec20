"""Checks a client's request, renders its chat template, tokenizes its prompt and fills in its defaults."""
