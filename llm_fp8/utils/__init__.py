"""Errors, JSON files, ranks, imports, private names of libraries."""
