"""Verbs of the command line: one module per family, with the arguments and the code of its verbs. Longer code is in a
module beside it, without `VERBS`. A family imports that, and the rooms, only inside functions, so that --help is
instant."""
