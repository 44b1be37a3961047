"""Precision of a run: plan, autocast context, conversion of layers to fp8, fp8 coverage and the certificate."""
