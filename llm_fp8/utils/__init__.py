"""Errors, JSON files, ranks, packages, output, and the private names of libraries."""
