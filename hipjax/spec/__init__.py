"""Decoding: drafts, verdicts, steps, requests."""
