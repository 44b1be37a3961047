"""What a run measures: metrics, kernel traces, energy, provenance, reporting."""
