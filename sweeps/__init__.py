"""The spec language and the command line: YAML in, a plan of trials out. Nothing heavy is imported here."""
