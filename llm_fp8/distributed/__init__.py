"""Distributed training: process groups, and a strategy for each kind of sharding mode."""
