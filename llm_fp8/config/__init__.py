"""Options, their parser and checks, and the settings that launchers pass through the environment."""
