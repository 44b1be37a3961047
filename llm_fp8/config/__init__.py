"""Options, their parser and validation, and what launchers put into the environment."""
