"""Content of checkpoints (`state`), and how they are written while training continues (`saves`).

`turnlog.trainer.checkpoint` decides which one a run resumes from.
"""
