"""Every decision of a run before it is built, for the machine that `look` sees or a dry run assumes."""
