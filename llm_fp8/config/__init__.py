"""Options, their parser and checks, and the settings that launchers pass in the environment."""
