"""Measurements of a run: metrics, kernel traces, energy, provenance, reporting."""
