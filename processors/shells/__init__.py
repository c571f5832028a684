"""Shells drive folds from the log: the transactional runner, its roles, the Faust live views."""
