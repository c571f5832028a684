"""Verbs of the command line: one module per family, with the arguments and the code of its verbs. A module imports the
rooms only inside functions, so that --help is instant."""
