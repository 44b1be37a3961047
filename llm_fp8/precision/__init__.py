"""In which precision a model computes: recipes, plan, autocast context, conversion of modules, coverage,
certificate.
"""
