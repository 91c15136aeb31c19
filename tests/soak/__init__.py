"""Runs that are killed at random moments until they have ended, compared with undisturbed runs.

`make soak` runs it; tests/soak/__main__.py is the command. It takes 20 minutes, so `make test` does
not include it.
"""
