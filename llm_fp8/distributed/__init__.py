"""Distribute a training run over processes: process groups, and a strategy for each kind of sharding mode."""
