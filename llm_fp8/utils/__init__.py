"""Errors, JSON files, ranks, subprocesses, imports."""
