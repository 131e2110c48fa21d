"""The command line, one file a command; installed as fusekit_cli."""
