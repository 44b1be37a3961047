"""Measure and report a run: metrics, kernel traces, energy and provenance."""
