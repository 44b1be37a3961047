"""Every decision of a run before anything is built: a pure function of options, config.json and machine."""
