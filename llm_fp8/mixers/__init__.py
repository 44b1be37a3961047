"""Token mixers of TE decoder layers in place of attention. This code has no dependency on options or data."""
