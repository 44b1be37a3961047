"""From a name or a folder to a model with weights, and back to a folder."""
