"""Views: the folds of the control topics, each of which exists once; roles, command line and dashboard query them.

A view has `apply(event)`, which ignores records of other kinds. Its caller reads the topics and leaves out the records
of other runs. Times are arguments of queries, because a view has no clock.
"""
