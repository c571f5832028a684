"""Content of checkpoints (`state`), and how they are written while training continues (`saves`).

`turnlog.trainer.checkpoints.cursor` decides which one a run resumes from.
"""
