"""The command line, one file a verb; installed as fusekit_cli."""
