"""All decisions about a run before its model is built, for this machine or, in a dry run, an assumed one."""
