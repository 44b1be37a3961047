"""Precision of a model: recipes, plan, autocast context, conversion, coverage, certificate."""
